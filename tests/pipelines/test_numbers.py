"""A pipeline's numbers are those of one device on the whole batch: logs, weights, evaluation, predictions."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sampling

ENGINES = ("jax", "tensorflow", "torch")
#: those on which a stage may be split over several ranks
SPLITTING = ("jax", "torch")
SCHEDULES = ("gpipe", "interleaved", "zb1p", "zbv", "auto", "1f1b+remat", "zbv+2x2")


def _off(names: tuple[str, ...], schedules: tuple[str, ...]) -> list[str]:
    from tests.pipelines import models

    return models.off(names or models.SOME, schedules)


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_those_of_one_device(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, (), ("1f1b",)) == []


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_inputs_and_verdicts(engine: str, on_ranks: Any) -> None:
    """Two inputs; a gradient that only the first stage has too large: none is updated."""
    names = ("list_of_inputs", "dict_of_inputs", "overflow_of_one_stage")
    assert on_ranks(engine)(_off, names, ("1f1b",)) == []


def _by_hand() -> list[str]:
    import contextlib

    import keras

    import keras_flow as kf
    from tests.pipelines import models

    pipe = kf.Placement(range(4), axis_names=("pipe",))
    ways = {
        "one device": kf.DataParallel(kf.Placement([0]), random="logical"),
        "micro-batches": kf.PipelineParallel(pipe, microbatches=4, random="logical"),
        "no distribution": contextlib.nullcontext(),
    }
    found: dict[str, Any] = {}
    begun: list[Any] = []
    for name, way in ways.items():
        keras.utils.set_random_seed(3)
        with getattr(way, "scope", lambda: way)():  # noqa: B023
            x = inputs = keras.Input((5,))
            for rank, width in ((0, 6), (2, 5), (1, 3)):
                on = contextlib.nullcontext() if name == "one device" else kf.scope.placement("cpu", f"0:{rank}")
                with on:
                    x = keras.layers.Dense(width, "tanh")(x)
            model = keras.Model(inputs, x)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
            begun = begun or model.get_weights()
            model.set_weights(begun)
        given: dict[str, Any] = {"batch_size": 8, "verbose": 0}
        history = model.fit(models.X, models.Y, epochs=2, shuffle=False, **given).history
        predicted = model.predict(models.X, **given)
        found[name] = {"logs": history, "predictions": predicted, "weights": model.get_weights()}
    one = found.pop("one device")
    return [
        f"{way}: {key}"
        for way, other in found.items()
        for key, value in one.items()
        if models.distance(value, other[key]) > 2e-5
    ]


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_stages_by_hand(engine: str, on_ranks: Any) -> None:
    """On ranks that are not in order."""
    assert on_ranks(engine)(_by_hand) == []


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_stages_on_two_ranks(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("dropout", "tied_norm", "short_batch"), ("1f1b+2x2",)) == []


@pytest.mark.parametrize("engine", SPLITTING)
def test_stages_that_are_split(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("skips",), ("1f1b+split", "interleaved+lanes")) == []


def test_a_lane_without_rows(on_ranks: Any) -> None:
    """Its seeds go on with those of the lane that has rows: torch has a process for each."""
    assert on_ranks("torch")(_off, ("empty_lane",), ("1f1b+2x2",)) == []


def test_slots_that_are_split(on_ranks: Any) -> None:
    assert on_ranks("torch")(_off, ("adam", "tied_norm", "short_batch"), ("1f1b+zero",)) == []


def _refused() -> str:
    import keras_flow as kf
    from tests.pipelines import models

    try:
        models.trained(models.pipeline("1f1b+zero"), "accumulated_norm")
    except kf.FlowError as error:
        return str(error)
    return ""


def test_split_slots_with_a_norm_of_sums_are_refused(on_ranks: Any) -> None:
    assert "Leave one out" in on_ranks("torch")(_refused)


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_schedules(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("dropout", "masked_weights"), SCHEDULES) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_computed_again(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("blocks",), ("1f1b+blocks",)) == []


def test_processes_without_a_stage(on_ranks: Any) -> None:
    """On torch a process is a rank: two of four are not of the placement."""
    assert on_ranks("torch")(_off, ("dense",), ("gpipe",)) == []


def _limited(memory: int, schedule: str = "gpipe") -> str:
    import keras
    import numpy as np

    import keras_flow as kf

    pipe = kf.Placement(range(2), axis_names=("pipe",))
    distribution = kf.PipelineParallel(pipe, memory=memory, schedule=schedule, microbatches=4)
    with distribution.scope():
        inner = [keras.layers.Dense(64, "tanh") for _ in range(8)]
        model = keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.ones((256, 8), "float32"), np.ones((256, 1), "float32")
    try:
        trained = f"trained {len(model.fit(x, y, batch_size=256, verbose=0).history['loss'])}"
        explained = distribution.explain(model, 256)
        held = max(each.peak for each in explained.memory.values())
        return trained if schedule == "gpipe" else f"{trained}, {held <= memory}, {explained.idle:.2f}"
    except kf.FlowError as error:
        return str(error)


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_memory_of_a_rank(engine: str, on_ranks: Any) -> None:
    said = on_ranks(engine)(_limited, 390_000)
    # rank 1 has four layers of 64 and one of 1, with two slots for each weight
    assert said.startswith("memory=390000 (390 kB): rank 1 needs about 5"), said
    assert "256 rows in 4 micro-batches by gpipe (weights 66.82 kB, slots 133.6 kB, gradients 66.82 kB" in said, said
    assert said.endswith("kB") and 'With remat="stage" and microbatches=8 it is 3' in said, said
    assert on_ranks(engine)(_limited, 30_000).endswith("take more stages, or a smaller batch_size")
    assert on_ranks(engine)(_limited, 600_000) == "trained 1"


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_memory_orders_an_automatic_schedule(engine: str, on_ranks: Any) -> None:
    """With little memory a rank waits more, and `gpipe` would not fit; with less the step is refused."""
    wide, narrow = (on_ranks(engine)(_limited, memory, "auto") for memory in (600_000, 400_000))
    assert wide.startswith("trained 1, True, 0.") and narrow.startswith("trained 1, True, 0."), (wide, narrow)
    # a backward pass that is not split leaves the last rank nothing to hold back
    assert wide == narrow if engine == "tensorflow" else float(wide.split()[-1]) < float(narrow.split()[-1])
    assert "in 4 micro-batches by auto" in on_ranks(engine)(_limited, 360_000, "auto")


def _mixed(policy: str) -> list[str]:
    import keras

    from tests.pipelines import models

    distribution = models.pipeline("1f1b")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(3)
        with distribution.scope():
            model = models.dropout()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    finally:
        keras.config.set_dtype_policy(before)
    found = distribution.verify(model, models.X[:13], models.Y[:13])
    return [f"{row.quantity} of {row.name}, {row.batch}: {row.share:.2f}" for row in found.rows if not row.ok]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_mixed_precision(engine: str, policy: str, on_ranks: Any) -> None:
    """Gradients of micro-batches are rounded one by one: the tolerance is that of the dtype (`dist.verify`)."""
    assert on_ranks(engine)(_mixed, policy) == []


def _in_float64() -> float:
    import keras

    from tests.pipelines import models

    before = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        one, other = models.alone("regularized"), models.trained(models.pipeline("1f1b"), "regularized")
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(before)
    return max(models.distance(one[name], other[name]) for name in ("weights", "logs"))


@pytest.mark.parametrize("engine", ["tensorflow", pytest.param("torch", marks=pytest.mark.full)])
def test_double_precision(engine: str, on_ranks: Any) -> None:
    """Shares and sums of losses are doubles too. (JAX has them where its own switch is on.)"""
    assert on_ranks(engine)(_in_float64) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case(engine: str, on_ranks: Any) -> None:
    from tests.pipelines import models

    split = ("1f1b+split", "interleaved+lanes") if engine in SPLITTING else ()
    assert on_ranks(engine)(_off, tuple(models.CASES), ("1f1b", "1f1b+2x2", *split), timeout=3600.0) == []


_CHAIN = (("pipeline", "2x2"), ("2x2", "data"), ("data", "pipeline"))
_SPLIT = (("split", "data"), ("data", "split"))
_ZERO = (("zero", "data"), ("data", "zero"))


def _resumed(folder: str, chain: tuple[tuple[str, str], ...]) -> list[str]:
    import numpy as np

    import keras_flow as kf
    from tests.pipelines import models

    data = kf.DataParallel(kf.Placement(range(4), axis_names=("data",)), random="logical")
    names = {"pipeline": "1f1b", "2x2": "1f1b+2x2", "split": "1f1b+split", "zero": "1f1b+zero"}
    ways = {way: data if way == "data" else models.pipeline(names[way]) for pair in (("data",), *chain) for way in pair}

    def made(way: str) -> Any:
        import keras

        keras.utils.set_random_seed(3)
        with ways[way].scope():
            model = models.dense()
            model.compile("adam", "mse")
        return model

    def fit(model: Any, epochs: int) -> None:
        model.fit(models.X, models.Y, batch_size=models.ROWS, epochs=epochs, shuffle=False, verbose=0)

    whole = made("data")
    fit(whole, 4)
    found = []
    for one, other in chain:
        first, second = made(one), made(other)
        fit(first, 2)
        kf.checkpoint.save(f"{folder}/{one}", first, step=2)
        kf.checkpoint.load(f"{folder}/{one}", second)
        fit(second, 2)
        pairs = zip(second.get_weights(), whole.get_weights(), strict=True)
        off = max(float(np.abs(a - b).max()) for a, b in pairs)
        if off > 1e-6:
            found.append(f"{one} to {other}: weights are off by {off:.1e}")
        for slot in second.optimizer.variables:
            owner = next((w for w in second.weights if slot.name.startswith(w.path.replace("/", "_") + "_")), None)
            if owner is not None and kf.layout_of(slot).layout.placement != kf.layout_of(owner).layout.placement:
                found.append(f"{one} to {other}: {slot.path} is not where its variable is")
    return found


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_checkpoint_goes_on_in_another_layout(engine: str, on_ranks: Any, tmp_path: Any) -> None:
    assert on_ranks(engine)(_resumed, str(tmp_path), _CHAIN) == []


@pytest.mark.full
@pytest.mark.parametrize("engine", SPLITTING)
def test_a_checkpoint_of_split_stages(engine: str, on_ranks: Any, tmp_path: Any) -> None:
    assert on_ranks(engine)(_resumed, str(tmp_path), _SPLIT) == []


@pytest.mark.full
def test_a_checkpoint_of_split_slots(on_ranks: Any, tmp_path: Any) -> None:
    assert on_ranks("torch")(_resumed, str(tmp_path), _ZERO) == []
