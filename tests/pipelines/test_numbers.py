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
def test_stages_on_two_ranks(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("dropout", "tied_norm", "short_batch"), ("1f1b+2x2",)) == []


@pytest.mark.parametrize("engine", SPLITTING)
def test_stages_that_are_split(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("skips",), ("1f1b+split", "interleaved+lanes")) == []


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


def _by_hand(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model = models.dropout()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        given: dict[str, Any] = {"sample_weight": models.WEIGHTS, "return_dict": True}
        logs = [model.train_on_batch(models.X, models.Y, **given) for _ in range(3)]
        logs.append(model.test_on_batch(models.X, models.Y, **given))
        numbers = [float(each[name]) for each in logs for name in sorted(each)]
        found.append({"logs": numbers, "predictions": model.predict_on_batch(models.X), "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_steps_on_batches_by_hand(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_by_hand, "1f1b") == []


def _compiled_again(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model = models.blocks()
        frozen = [layer for layer in model.layers if layer.weights][1:3]
        logs: list[float] = []
        for loss, metric, number in (("mse", "mae", None), ("mae", "mse", None), ("mae", "mse", 0), ("mae", "mse", 1)):
            for index, layer in enumerate(frozen):
                layer.trainable = index != number
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=[metric])
            for _ in range(2):
                history = model.fit(models.X, models.Y, batch_size=13, shuffle=False, verbose=0).history
                logs += [history[name][0] for name in sorted(history)]
        found.append({"logs": logs, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_compiled_again(engine: str, on_ranks: Any) -> None:
    """It trains the new loss, and the weights that are trained now: as many, of the same shapes, as before."""
    assert on_ranks(engine)(_compiled_again, "1f1b") == []


def _draws() -> list[int]:
    import keras
    import numpy as np

    from tests.pipelines import models

    with models.pipeline("1f1b").scope():
        model = models.dropout()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(models.X, models.Y, batch_size=13, epochs=2, verbose=0)
    return [
        int(np.asarray(variable)[1]) for variable in model.variables if variable.path.endswith("seed_generator_state")
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rank_sees_how_often_each_stage_has_drawn(engine: str, on_ranks: Any) -> None:
    """A checkpoint holds what the first process sees."""
    assert on_ranks(engine).on_each(_draws) == [[2, 2, 2]] * (4 if engine == "torch" else 1)


def _changed(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        numbers: list[Any] = []
        with distribution.scope():
            model = keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(width) for width in (8, 7, 6, 5, 3))])
            for change in (lambda: None, model.pop, lambda: model.add(keras.layers.Dense(4)), model.pop):  # noqa: B023
                change()
                y = models.X[:, :1].repeat(model.output_shape[-1], 1)
                model.compile(keras.optimizers.SGD(0.1), "mse")
                numbers.append(model.predict(models.X, batch_size=13, verbose=0))
                numbers.append(model.fit(models.X, y, batch_size=13, verbose=0).history["loss"])
        found.append({"numbers": numbers, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_model_whose_layers_change(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_changed, "1f1b") == []


def _laid_otherwise(way: str) -> list[str]:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model, optimizer = models.dense(), keras.optimizers.SGD(0.1, momentum=0.9)
        given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
        for clipnorm in (None, 0.05):
            optimizer.clipnorm = clipnorm
            model.compile(optimizer, "mse")
            model.fit(models.X, models.Y, **given)
            with kf.DataParallel().scope():
                model.evaluate(models.X, models.Y, batch_size=13, verbose=0)
            with distribution.scope():
                model.fit(models.X, models.Y, **given)
        found.append(model.get_weights())
    return [] if models.distance(*found) < 2e-5 else ["weights"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_laid_otherwise_and_an_optimizer_that_changes(engine: str, on_ranks: Any) -> None:
    """What is compiled for an update has the optimizer's settings, and the variables of then."""
    assert on_ranks(engine)(_laid_otherwise, "1f1b") == []


def _shared(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
        numbers: list[Any] = []
        with distribution.scope():
            # the small layers are one stage of the whole, and several of what ends with them
            layers = [keras.layers.Dense(width, activation="tanh") for width in (4, 4, 4, 4, 16, 16, 16, 3)]
            model = keras.Sequential([keras.Input((5,)), *layers])
            every = [keras.Model(model.inputs, keras.layers.Dense(3)(layers[number].output)) for number in (2, 3)]
            for each in (*every, model):
                each.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            for each in (*every, model, *every):
                numbers.append(each.fit(models.X, models.Y, **given).history["loss"])
        found.append({"numbers": numbers, "weights": [each.get_weights() for each in (*every, model)]})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", ENGINES)
def test_models_that_call_a_layer_in_other_stages(engine: str, on_ranks: Any) -> None:
    """Its weights are where the model that is used calls it: on torch another rank has no memory for them."""
    assert on_ranks(engine)(_shared, "1f1b") == []


def _tied_and_frozen(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
        numbers: list[Any] = []
        with distribution.scope():
            model = models.tied_dense()
            shared = next(layer for layer in model.layers if len(layer._inbound_nodes) == 2)
            adapters = {"a_initializer": keras.initializers.GlorotUniform(seed=9), "b_initializer": "ones"}
            changes: dict[str, Any] = {
                "frozen": lambda: setattr(shared, "trainable", False),  # noqa: B023
                "trained": lambda: setattr(shared, "trainable", True),  # noqa: B023
                "frozen again": lambda: setattr(shared, "trainable", False),  # noqa: B023
                "adapters": lambda: (setattr(shared, "trainable", True), shared.enable_lora(2, **adapters)),  # noqa: B023
            }
            for change in changes.values():
                change()
                model.compile(keras.optimizers.SGD(0.1), "mse")
                numbers.append(model.fit(models.X, models.Y, **given).history["loss"])
                numbers.append(model.predict(models.X, batch_size=13, verbose=0))
        found.append({"numbers": numbers, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_of_several_stages_that_is_frozen(engine: str, on_ranks: Any) -> None:
    """Before the first step, after it, and by adapters: the other ranks get copies, as of weights that are trained."""
    assert on_ranks(engine)(_tied_and_frozen, "1f1b") == []


def _loaded(folder: str) -> list[float]:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
    with models.pipeline("1f1b").scope():
        model = models.skips()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(models.X, models.Y, **given)
        model.save_weights(f"{folder}/of.weights.h5")
        kf.comm.barrier()
        before = model.get_weights()
        model.fit(models.X, models.Y, **given)
        model.load_weights(f"{folder}/of.weights.h5")
    return models.distance(before, model.get_weights())


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_functional_model_is_loaded_after_a_step(engine: str, on_ranks: Any, tmp_path: Any) -> None:
    """Keras loads what the model's attributes hold: its stages are none of it."""
    assert on_ranks(engine)(_loaded, str(tmp_path)) == 0.0


def _with_a_scalar(folder: str) -> list[float]:
    import keras
    import numpy as np

    import keras_flow as kf
    from tests.pipelines import models

    class Scaled(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return x * self.scale

    with models.pipeline("1f1b").scope():
        model = keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(width) for width in (4, 4, 3)), Scaled()])
        model.compile("sgd", "mse")
    model.fit(models.X, models.Y, batch_size=13, verbose=0)
    model.save_weights(f"{folder}/of.weights.h5")
    kf.comm.barrier()
    scale = float(np.asarray(model.get_weights()[-1]))
    model.layers[-1].scale.assign(0.0)
    model.load_weights(f"{folder}/of.weights.h5")
    return [scale, float(np.asarray(model.get_weights()[-1]))]


def test_a_weight_without_dims_is_saved(on_ranks: Any, tmp_path: Any) -> None:
    """The last stage's, which another rank writes."""
    before, after = on_ranks("torch")(_with_a_scalar, str(tmp_path))
    assert before == after != 1.0


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


def _one_gradient_dropped() -> list[str]:
    from keras_flow.pipelines import passes
    from tests.pipelines import models

    added = passes.Pass._add

    def drops(run: Any, stage: Any, gradients: Any) -> None:
        if not hasattr(run, "dropped"):
            run.dropped = True
            return
        added(run, stage, gradients)

    passes.Pass._add = drops  # type: ignore[method-assign]
    try:
        return models.off(("dense",), ("gpipe",))
    finally:
        passes.Pass._add = added  # type: ignore[method-assign]


def _means_of_means() -> list[str]:
    import numpy as np

    from keras_flow.pipelines import losses
    from tests.pipelines import models

    right = losses.shares
    losses.shares = lambda *args: np.full_like(right(*args), 0.25)  # type: ignore[assignment]
    try:
        return models.off(("dense",), ("gpipe",))
    finally:
        losses.shares = right


def _tied_counted_once_more() -> list[str]:
    from keras_flow.pipelines import staged_model
    from tests.pipelines import models

    right = staged_model.update

    def twice(of: Any, optimizer: Any, gradients: Any, scale: float) -> None:
        last = max(gradients)
        right(of, optimizer, {**gradients, last: [2 * gradient for gradient in gradients[last]]}, scale)

    staged_model.update = twice  # type: ignore[assignment]
    try:
        return models.off(("tied",), ("gpipe",))
    finally:
        staged_model.update = right


def _a_stage_steps_early() -> list[str]:
    from keras_flow.pipelines import passes
    from tests.pipelines import models

    added = passes.Pass._add

    def steps(run: Any, stage: Any, gradients: Any) -> None:
        added(run, stage, gradients)
        weights = run._weights[stage.number]
        run._weights[stage.number] = [one - 0.1 * other for one, other in zip(weights, gradients, strict=True)]

    passes.Pass._add = steps  # type: ignore[method-assign]
    try:
        return models.off(("dense",), ("1f1b",))
    finally:
        passes.Pass._add = added  # type: ignore[method-assign]


def _counted_by_each_rank() -> list[str]:
    from keras_flow.pipelines import lanes
    from tests.pipelines import models

    right = lanes.Lanes.sum_on

    def by_each(of: Any, rank: int, values: Any) -> Any:
        counts, of.counts = of.counts, True
        try:
            return right(of, rank, values)
        finally:
            of.counts = counts

    lanes.Lanes.sum_on = by_each  # type: ignore[method-assign]
    try:
        return models.off(("tied_norm",), ("1f1b+split",))
    finally:
        lanes.Lanes.sum_on = right  # type: ignore[method-assign]


def test_a_norm_that_each_rank_of_a_lane_counts_is_seen(on_ranks: Any) -> None:
    assert any("weights are off" in text for text in on_ranks("torch")(_counted_by_each_rank))


@pytest.mark.parametrize(
    "fault", [_one_gradient_dropped, _means_of_means, _tied_counted_once_more, _a_stage_steps_early]
)
def test_a_fault_is_seen(fault: Any, on_ranks: Any) -> None:
    assert any("weights are off" in text for text in on_ranks("tensorflow")(fault))
