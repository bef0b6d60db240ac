"""`remat=` on every rank of an engine: a few steps of blocks with dropout, batch statistics and losses of their own."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np

import keras_flow as kf

LAYOUTS = ("dp4", "2x2", "dp4z3", "one")
#: what is computed again: by Keras's own scope, as the model's blocks, by patterns (layers within blocks too)
WAYS: dict[str, Any] = {"scope": None, "block": "block", "patterns": ["block_0", "block_1/up$", "out"]}


class Block(keras.layers.Layer):
    """Two dense layers with all that a second run could change: draws, moving statistics, a loss."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        penalty = keras.regularizers.L2(1e-3)
        self.up = keras.layers.Dense(8, "relu", name="up", activity_regularizer=penalty)
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.drop = keras.layers.Dropout(0.3, name="drop")
        self.down = keras.layers.Dense(shape[-1], name="down")
        inner = (*shape[:-1], 8)
        for layer, given in ((self.up, shape), (self.norm, inner), (self.drop, inner), (self.down, inner)):
            layer.build(given)

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Add a branch."""
        inner = self.drop(self.norm(self.up(x), training=training), training=training)
        return x + self.down(inner)


def _distribution(layout: str, remat: Any) -> Any:
    given = {"random": "logical", "remat": remat}
    if layout == "2x2":
        mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        rules = {"up/kernel": {"model": "S(1)"}, "up/bias": {"model": "S(0)"}, "down/kernel": {"model": "S(0)"}}
        rules["out/kernel"] = {"model": "S(1)"}
        return kf.ModelParallel(mesh, rules=rules, batch_axes="data", **given)
    if layout == "one":
        return kf.DataParallel(kf.Placement([0]), **given)
    return kf.DataParallel(zero=3 if layout.endswith("z3") else 0, zero_min_size=1, **given)


def trained(layout: str, way: str | None, rows: int, spoilt: bool = False) -> tuple[list[np.ndarray], list[float], int]:
    """What plain SGD makes of all variables in two epochs, the losses, and how many layers were computed again.

    Args:
        layout: one of LAYOUTS.
        way: one of WAYS; None: nothing is computed again.
        rows: of a batch; of 13 rows the last one has fewer.
        spoilt: whether the second run draws other numbers than the first.
    """
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(13, width)).astype("float32") for width in (6, 4))
    distribution = _distribution(layout, None if way is None else WAYS[way])
    keras.utils.set_random_seed(0)
    # a scope of None is not the same as none: it leaves a mode in its layers
    with distribution.scope(), keras.RematScope("full") if way == "scope" else contextlib.nullcontext():
        blocks = [Block(name=f"block_{index}") for index in range(3)]
        model = keras.Sequential([keras.layers.Input((6,)), *blocks, keras.layers.Dense(4, name="out")], name="net")
        model.compile(keras.optimizers.SGD(0.02), "mse")
        with _spoilt() if spoilt else keras.name_scope("right"):
            history = model.fit(x, y, batch_size=rows, epochs=2, verbose=0, shuffle=False)
        losses = [*history.history["loss"], float(model.evaluate(x, y, verbose=0))]
    return [np.array(each) for each in model.variables], losses, len(distribution.rematerialized)


def recurrent(remat: list[str] | None) -> list[np.ndarray]:
    """What three steps make of a recurrent layer, which keeps a dropout mask while it runs through its time steps."""
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(12, *shape)).astype("float32") for shape in ((5, 6), (4,)))
    keras.utils.set_random_seed(0)
    with kf.DataParallel(remat=remat, random="logical").scope():
        hidden = keras.layers.SimpleRNN(8, dropout=0.3, recurrent_dropout=0.2, name="hidden")
        model = keras.Sequential([keras.layers.Input((5, 6)), hidden, keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    return model.get_weights()


class Choosing(keras.layers.Layer):
    """Scales by a number that Python's generator draws."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x: Any) -> Any:
        """Scale."""
        return keras.ops.tanh(x * self.scale * random.random())


def choosing(remat: list[str] | None) -> list[np.ndarray]:
    """What two steps make of a layer that draws by Python's generator."""
    x, y = (np.random.default_rng(0).normal(size=(8, 4)).astype("float32") for _ in range(2))
    keras.utils.set_random_seed(0)
    with kf.DataParallel(remat=remat, random="logical").scope():
        model = keras.Sequential([keras.layers.Input((4,)), Choosing(name="choosing"), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    return model.get_weights()


def refusal_of_writing() -> str:
    """What is said of a layer that adds to its images where they are."""
    with kf.DataParallel(remat=["writing"]).scope():
        inputs = keras.Input((4, 4, 3))
        images = keras.layers.Dense(3)(inputs) * 1.0
        images = keras.layers.RandomBrightness(0.3, (0, 1), seed=3, name="writing")(images)
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(images)))
        model.compile("sgd", "mse")
    try:
        model.fit(np.ones((4, 4, 4, 3)), np.ones((4, 2)), verbose=0)
    except kf.FlowError as error:
        return str(error)
    return "nothing"


def _spoilt() -> Any:
    """Inside, no seed is taken back for the second run."""
    from unittest import mock

    from keras_flow.backends import rematerialized

    return mock.patch.object(rematerialized, "_seeds", lambda layer: [])
