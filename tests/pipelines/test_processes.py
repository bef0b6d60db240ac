"""Pipelines in two processes, each with a stage, with several, or with a lane: the numbers of one device on each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sampling
from tests.ranks import Pool, RankError

#: torch has a process for each rank in every test
ENGINES = ("jax", "tensorflow")
TwoProcesses = Callable[[str, int], Pool]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    """Return a function that gives the warm pool of an engine: two processes, which drive so many ranks together."""
    pools: dict[tuple[str, int], Pool] = {}

    def pool(engine: str, ranks: int) -> Pool:
        if (engine, ranks) not in pools:
            for other in pools.values():
                other.close()
            pools.clear()
            pools[engine, ranks] = Pool(engine, tmp_path_factory.mktemp(engine), ranks=ranks, processes=2)
        return pools[engine, ranks]

    yield pool
    for each in pools.values():
        each.close()


def _alone(names: tuple[str, ...]) -> dict[str, Any]:
    from tests.pipelines import models

    return {name: models.alone(name) for name in names or models.CASES}


def _off(expected: dict[str, Any], schedules: tuple[str, ...]) -> list[str]:
    from tests.pipelines import models

    return models.off(tuple(expected), schedules, expected)


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_stage_in_each(engine: str, two_processes: TwoProcesses, on_ranks: Any) -> None:
    expected = on_ranks(engine)(_alone, ("dropout",))
    assert two_processes(engine, 2).on_each(_off, expected, ("gpipe", "1f1b", "zb1p")) == [[], []]
    expected = on_ranks(engine)(_alone, ("tied_norm", "two_outputs"))
    assert two_processes(engine, 2).on_each(_off, expected, ("1f1b",)) == [[], []]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case(engine: str, two_processes: TwoProcesses, on_ranks: Any) -> None:
    expected = on_ranks(engine)(_alone, (), timeout=3600.0)
    assert two_processes(engine, 2).on_each(_off, expected, ("1f1b",), timeout=3600.0) == [[], []]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
def test_several_ranks_in_each(engine: str, two_processes: TwoProcesses, on_ranks: Any) -> None:
    expected = on_ranks(engine)(_alone, ("dropout", "tied_norm", "short_batch"))
    ways = ("1f1b", "1f1b+2x2", "1f1b+across")  # the others are on two ranks, which one process drives
    assert two_processes(engine, 4).on_each(_off, expected, ways, timeout=1200.0) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_several_stages_of_several_ranks_in_each(engine: str, two_processes: TwoProcesses, on_ranks: Any) -> None:
    """Each process waits for the other in the middle of what it does for several ranks, in training and evaluation."""
    expected = on_ranks(engine)(_alone, ("deep",))
    assert two_processes(engine, 4).on_each(_off, expected, ("interleaved+four",)) == [[], []]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engine", "processes"), [("jax", None), ("jax", 2), ("torch", None)])
def test_stages_of_split_lanes(engine: str, processes: int | None, tmp_path: Path, on_ranks: Any) -> None:
    """Each of eight ranks is of a stage, of a lane, and has a part of its weights."""
    expected = on_ranks(engine)(_alone, ("dropout", "tied_norm", "short_batch", "masked_weights"))
    pool = Pool(engine, tmp_path, ranks=8, processes=processes)
    try:
        for off in pool.on_each(_off, expected, ("1f1b+2x2x2",), timeout=1200.0):
            assert off == []
    finally:
        pool.close()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_split_stages_in_each(two_processes: TwoProcesses, on_ranks: Any, tmp_path: Path) -> None:
    """A process of JAX drives all ranks of a lane: of one stage (`split`), or of both (`lanes`)."""
    pool, ways = two_processes("jax", 4), ("1f1b+split", "1f1b+lanes")
    expected = on_ranks("jax")(_alone, ("dropout", "tied_norm", "short_batch", "masked_weights"))
    assert pool.on_each(_off, expected, ways, timeout=1200.0) == [[], []]
    _check_kept(pool.on_each(_kept, str(tmp_path), ways[0]), on_ranks("jax")(_loaded, str(tmp_path)))
    for said in pool.on_each(_refused):
        assert "ranks [0, 2] compute together and are of several processes" in said


def _refused() -> str:
    import keras_flow as kf

    placement = kf.Placement([[0, 2], [1, 3]], ("pipe", "model"))
    with pytest.raises(kf.FlowError) as refused:
        kf.PipelineParallel(placement, rules={"kernel": {"model": kf.sbp.split(1)}})
    return str(refused.value)


def _kept(folder: str, way: str) -> dict[str, Any]:
    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import backend
    from tests.pipelines import models

    distribution = models.pipeline(way)
    keras.utils.set_random_seed(3)
    with distribution.scope():
        model, other = models.dense(), models.dense()
        model.compile("adam", "mse")
        other.compile("adam", "mse")

    def fit(model: keras.Model) -> None:
        model.fit(models.X, models.Y, batch_size=models.ROWS, epochs=2, shuffle=False, verbose=0)

    fit(model)
    model.save(f"{folder}/model.keras")
    kf.checkpoint.save(f"{folder}/checkpoint", model, step=2)
    kf.checkpoint.load(f"{folder}/checkpoint", other)
    before = model.get_weights()
    held = {weight.path: sum(map(np.size, backend().shards(weight).values())) for weight in model.weights}
    explained = str(distribution.explain(model, batch_size=models.ROWS))
    fit(model)
    fit(other)
    return {
        "weights": before,
        "further": max(
            float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), other.get_weights(), strict=True)
        ),
        "held": list(held.values()),
        "sizes": [weight.size for weight in before],
        "slots": sum(
            sum(map(np.size, backend().shards(slot).values())) for slot in model.optimizer.variables if len(slot.shape)
        ),
        "explained": "1f1b" in explained,
        "set": _set(model, before),
    }


def _check_kept(each: list[dict[str, Any]], loaded: list[Any]) -> None:
    """See that what each of the ranks kept is the same on all, and in the files."""
    for found in each:
        assert found["further"] < 1e-6 and found["set"] == 0.0 and found["explained"]
        for weights in loaded:
            assert all((one == other).all() for one, other in zip(found["weights"], weights, strict=True))


def _set(model: Any, weights: list[Any]) -> float:
    import numpy as np

    model.set_weights([2 * each for each in weights])
    return max(float(np.abs(a - 2 * b).max()) for a, b in zip(model.get_weights(), weights, strict=True))


def _loaded(folder: str) -> Any:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    with kf.DataParallel(kf.Placement([0])).scope():
        model = models.dense()
    model.load_weights(f"{folder}/model.keras")
    return keras.models.load_model(f"{folder}/model.keras").get_weights(), model.get_weights()


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_what_is_kept(engine: str, two_processes: TwoProcesses, on_ranks: Any, tmp_path: Path) -> None:
    """A process has the weights of its stage alone, and a file has all."""
    first, second = each = two_processes(engine, 2).on_each(_kept, str(tmp_path), "1f1b")
    _check_kept(each, on_ranks(engine)(_loaded, str(tmp_path)))
    assert 0 < sum(first["held"]) < sum(first["sizes"])
    assert [a + b for a, b in zip(first["held"], second["held"], strict=True)] == first["sizes"]


def _state_of_rows() -> str:
    import keras
    import numpy as np

    import keras_flow as kf

    class LastMean(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.seen.assign(keras.ops.mean(x))
            return x

    with kf.PipelineParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("pipe", "data"))).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), LastMean(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        try:
            model.fit(np.arange(32.0).reshape(8, 4), np.ones((8, 2)), verbose=0)
        except kf.FlowError as error:
            return str(error)
    return ""


def test_state_that_depends_on_rows_is_refused_on_all_ranks(on_ranks: Any) -> None:
    """One rank sees that its own differs; the others must not wait for it."""
    found = on_ranks("torch").on_each(_state_of_rows, timeout=60.0)
    assert all("has state that depends on the rows that it sees" in text for text in found)


def _all_kept(on_ranks: Any, folder: Path, way: str) -> list[dict[str, Any]]:
    """What each of the ranks kept, once it is checked."""
    each = on_ranks("torch").on_each(_kept, str(folder), way)
    _check_kept(each, on_ranks("torch")(_loaded, str(folder)))
    return each


def test_what_is_kept_of_split_slots(on_ranks: Any, tmp_path: Path) -> None:
    """With `zero=1` ranks that share the rows of a stage have its weights whole, and each a part of Adam's slots."""
    each = _all_kept(on_ranks, tmp_path, "1f1b+zero")
    sizes = each[0]["sizes"]
    assert sum(sum(found["held"]) for found in each) == 2 * sum(sizes)
    assert sum(found["slots"] for found in each) == 2 * (sum(sizes) + 3)  # a bias of 3 does not divide


def test_what_is_kept_of_split_stages(on_ranks: Any, tmp_path: Path) -> None:
    """On torch a rank has its part of its stage's weights; biases are whole on both ranks of a stage."""
    each = _all_kept(on_ranks, tmp_path, "1f1b+split")
    sizes = each[0]["sizes"]
    kernels, biases = [8 * 5, 8 * 8, 8 * 6], [8, 8, 6, 3]  # that of the last layer has three columns: it is whole
    assert sizes == [kernels[0], 8, kernels[1], 8, kernels[2], 6, 6 * 3, 3]
    assert sum(map(sum, (found["held"] for found in each))) == sum(kernels) + 2 * (6 * 3 + sum(biases))
    assert all(0 < sum(found["held"]) < sum(sizes) / 2 for found in each)


def _killed_while_it_trains() -> None:
    import keras_flow as kf
    from tests.pipelines import models

    def stop(batch: int, logs: Any) -> None:
        if batch == 2 and kf.env.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    import keras

    with models.pipeline("1f1b").scope():
        model = models.dense()
        model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(models.X, models.Y, batch_size=4, epochs=50, verbose=0, callbacks=[callback])


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_process_that_is_killed_ends_the_other(engine: str, two_processes: TwoProcesses) -> None:
    pool = two_processes(engine, 2)
    pool(time.time)  # it has started
    begin = time.monotonic()
    with pytest.raises(RankError, match="ended"):
        pool(_killed_while_it_trains)
    assert time.monotonic() - begin < 60.0  # with the compilation before it
