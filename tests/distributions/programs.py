"""The model, data and placements that the tests of distributions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend

TENSOR = kf.Placement(range(4), axis_names=("model",))
DATA = kf.Placement(range(4), axis_names=("data",))
HYBRID = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))

RULES: Mapping[str, kf.sbp.SbpSpec] = {
    "hidden/kernel": {"model": kf.sbp.split(1)},
    "hidden/bias": {"model": kf.sbp.split(0)},
    "logits/kernel": {"model": kf.sbp.split(0)},
}


def tensor_parallel(**rules: object) -> kf.ModelParallel:
    """Four ranks on the axis "model"."""
    return kf.ModelParallel(TENSOR, rules=rules or RULES)  # type: ignore[arg-type]


def hybrid() -> kf.ModelParallel:
    """Two by two ranks on the axes "data" and "model"."""
    return kf.ModelParallel(HYBRID, rules=RULES)


def build(hidden: int = 16, classes: int = 4, compiled: bool = True, extra: Sequence[keras.Layer] = ()) -> keras.Model:
    """8 features -> `hidden` (relu) -> `classes` logits; Adam."""
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(hidden, activation="relu", name="hidden"),
            *extra,
            keras.layers.Dense(classes, name="logits"),
        ],
        name="model",
    )
    if compiled:
        compile(model)
    return model


def compile(model: keras.Model) -> None:
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def rows(count: int = 48, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Random rows [count, 8] and targets [count]."""
    random = np.random.default_rng(0)
    return random.standard_normal((count, 8)).astype("float32"), random.integers(0, classes, count)


def fit(model: keras.Model, count: int = 48, **options: object) -> list[float]:
    """Losses of two epochs in a fixed order, batches of 16 rows."""
    x, y = rows(count)
    settings = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, **settings).history["loss"]  # type: ignore[arg-type]


def same(model: keras.Model, other: keras.Model) -> None:
    """Weights within the tolerance of docs/design.md."""
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * max(1.0, float(np.abs(b).max(initial=0.0))))


def held(variable: keras.Variable) -> dict[int, tuple[int, ...]]:
    """rank -> shape that it physically holds."""
    return {rank: shard.shape for rank, shard in backend().shards(variable).items()}


def variable(model: keras.Model, path: str) -> keras.Variable:
    """The variable whose path ends so."""
    (found,) = [one for one in model.variables if one.path.endswith(path)]
    return found
