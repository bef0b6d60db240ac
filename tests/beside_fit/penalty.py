"""WGAN-GP: a `train_step` of one's own whose loss has the gradient of a model by its inputs (Gulrajani 2017)."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras import layers as L
from keras import ops

import keras_flow as kf
from tests.beside_fit.models import difference
from tests.one_device import one_device
from tests.parity.cases.training import adversaries

#: rows of the data, and of a batch: the last batch is short, and divides by no axis
ROWS, BATCH = 19, 8


class Losses:
    """Wasserstein's distance, and the penalty of gradients whose norm is not one."""

    def _judge_loss(self: Any, real: Any, noise: Any) -> Any:
        made = self.maker(noise)
        share = ops.reshape(ops.sigmoid(noise[:, 0]), (-1, *[1] * (len(real.shape) - 1)))
        gradient = importlib.import_module(f"tests.beside_fit.by_{keras.backend.backend()}").gradient
        slope = gradient(lambda x: ops.sum(self.judge(x)), share * real + (1.0 - share) * made)
        penalty = ops.mean((ops.sqrt(ops.sum(slope**2, axis=tuple(range(1, len(slope.shape)))) + 1e-6) - 1.0) ** 2)
        return ops.mean(self.judge(made)) - ops.mean(self.judge(real)) + 10.0 * penalty

    def _maker_loss(self: Any, noise: Any) -> Any:
        return -ops.mean(self.judge(self.maker(noise)))


def _dense() -> tuple[keras.Model, keras.Model, tuple[int, ...]]:
    maker = keras.Sequential([L.Input((4,)), L.Dense(8, "tanh", name="h"), L.Dense(6, name="o")])
    judge = keras.Sequential([L.Input((6,)), L.Dense(8, "tanh", name="h"), L.Dense(1)])
    return maker, judge, (6,)


def _convolutional() -> tuple[keras.Model, keras.Model, tuple[int, ...]]:
    maker = keras.Sequential([L.Input((4,)), L.Dense(32, name="h"), L.Reshape((4, 4, 2))])
    maker.add(L.Conv2DTranspose(1, 3, 2, padding="same", activation="tanh"))
    # smooth: where a slope jumps, rounding alone makes other numbers of a gradient's gradient
    judge = keras.Sequential([L.Input((8, 8, 1)), L.Conv2D(4, 3, 2, padding="same", activation="tanh")])
    judge.add(L.LayerNormalization())
    judge.add(L.Flatten())
    judge.add(L.Dense(1, name="o"))
    return maker, judge, (8, 8, 1)


MODELS = {"dense": _dense, "convolutional": _convolutional}


def trained(name: str, scope: Callable[[], AbstractContextManager]) -> list[np.ndarray]:
    """The loss of each epoch, then the weights, of a model trained by plain SGD in a scope."""
    with scope():
        keras.utils.set_random_seed(1)
        maker, judge, shape = MODELS[name]()
        x = np.random.default_rng(3).normal(size=(ROWS, *shape)).astype("float32")
        model = adversaries(maker, judge, Losses)
        model.compile(keras.optimizers.SGD(0.005), keras.optimizers.SGD(0.005))
        history = model.fit(x, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return [np.asarray(history.history["loss"]), *map(np.asarray, model.get_weights())]


def failures(names: list[str], scopes: dict[str, Callable[[], AbstractContextManager]]) -> list[str]:
    """What is not as on one device, to 1e-5.

    Args:
        names: of MODELS.
        scopes: layout -> makes its scope.
    """
    expected = {name: trained(name, one_device) for name in names}
    wrong = []
    for name, (layout, scope) in itertools.product(names, scopes.items()):
        try:
            off = difference(expected[name], trained(name, scope))
        except kf.FlowError as error:
            wrong.append(f"{name} {layout}: {str(error)[:300]}")
            continue
        if not off < 1e-5:
            wrong.append(f"{name} {layout}: off by {off}")
        print(f"{name} {layout}: {off}", flush=True)
    return wrong
