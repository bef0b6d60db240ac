"""`kf.CentralStorage`: held once, computed by all ranks, the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sampling

ENGINES = ("jax", "tensorflow", "torch")


def _off(names: tuple[str, ...]) -> list[str]:
    from tests.pipelines import models

    return models.off(names or tuple(models.CASES), ("central",))


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_the_numbers_of_one_device(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, ("dropout", "momentum")) == []


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_off, (), timeout=3600.0) == []


def _held(folder: str) -> dict[str, Any]:
    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import backend
    from tests.pipelines import models

    with kf.CentralStorage().scope():
        model = models.dense()
        model.compile("adam", "mse")
    model.fit(models.X, models.Y, batch_size=models.ROWS, verbose=0)
    model.save(f"{folder}/model.keras")
    kernel = model.layers[0].kernel
    slot = next(each for each in model.optimizer.variables if tuple(each.shape) == (5, 8))
    loaded = keras.models.load_model(f"{folder}/model.keras")
    pairs = zip(model.get_weights(), loaded.get_weights(), strict=True)
    with kf.CentralStorage().scope() as distribution:
        memory = distribution.explain(model, batch_size=13).memory
    return {
        "held": sorted({*backend().shards(kernel), *backend().shards(slot)}),
        "rank": kf.env.local_ranks()[0],
        "saved": max(float(np.abs(one - other).max()) for one, other in pairs),
        "weights": {rank: each.weights for rank, each in memory.items()},
        "slots": {rank: each.slots for rank, each in memory.items()},
        "bytes": 4 * model.count_params(),
    }


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_one_rank_holds_weights_and_slots(engine: str, on_ranks: Any, tmp_path: Any) -> None:
    for found in on_ranks(engine).on_each(_held, str(tmp_path)):
        assert found["held"] == ([0] if found["rank"] == 0 else [])
        assert found["saved"] == 0.0
        assert found["weights"] == {0: found["bytes"], 1: 0, 2: 0, 3: 0}
        assert found["slots"] == {0: 2 * found["bytes"], 1: 0, 2: 0, 3: 0}


def _refused() -> list[str]:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    found = []
    try:
        kf.CentralStorage(kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model")))
    except kf.FlowError as error:
        found.append(str(error))
    two = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1)))
    for layer, optimizer in (
        (keras.layers.BatchNormalization(), "sgd"),
        (keras.layers.SpectralNormalization(keras.layers.Dense(4)), "sgd"),
        (keras.layers.Dense(4, dtype="float8_from_float32"), "sgd"),
        (keras.layers.Dense(4), two),
    ):
        with kf.CentralStorage().scope():
            model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(3)])
            model.compile(optimizer, "mse")
        try:
            model.fit(models.X, models.Y, batch_size=models.ROWS, verbose=0)
        except kf.FlowError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_what_it_cannot_do_is_said(engine: str, on_ranks: Any) -> None:
    axes, statistics, kernel, scales, two = on_ranks(engine)(_refused)
    assert "takes ranks along one axis" in axes and "['data', 'model']" in axes
    assert statistics.startswith("CentralStorage: layer ")
    assert "takes the statistics of all rows of a batch" in statistics
    assert "or train it under kf.DataParallel" in statistics
    assert "assigns its kernel in each call, and CentralStorage calls it for some rows" in kernel
    assert "assigns the scales of float8 in each call" in scales
    assert "CentralStorage updates variables rank by rank, which keras.optimizers.MultiOptimizer does not take" in two
