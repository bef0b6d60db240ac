"""`zero=3` on JAX: what the forward pass computes may be of any dtype."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf

pytestmark = pytest.mark.usefixtures("four_ranks")


class Spectrum(keras.layers.Layer):
    """The power of windows of its input, weighted."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.weight = self.add_weight(shape=(shape[-1],), initializer="ones", name="weight")

    def call(self, x: Any) -> Any:
        real, imaginary = keras.ops.stft(x * self.weight, 16, 8, 16)
        return keras.ops.mean(real**2 + imaginary**2, axis=(1, 2))[:, None]


def _weights(distribution: kf.DataParallel) -> np.ndarray:
    with distribution.scope():
        model = keras.Sequential([keras.Input((64,)), Spectrum()])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    model.fit(x, x[:, :1], verbose=0)
    return model.get_weights()[0]


def test_complex_values_in_a_layer() -> None:
    split = _weights(kf.DataParallel(zero=3, zero_min_size=1))
    np.testing.assert_allclose(split, _weights(kf.DataParallel(kf.Placement([0]))), rtol=1e-5)
    assert not np.allclose(split, 1.0)


@pytest.mark.parametrize("random", ["logical", "stock"])
def test_keys_of_draws_in_a_layer(random: str) -> None:
    def updated(distribution: kf.DataParallel) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        with distribution.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
        model.fit(x, x, verbose=0)
        return model.get_weights()

    split = updated(kf.DataParallel(zero=3, zero_min_size=1, random=random))
    for one, other in zip(split, updated(kf.DataParallel(kf.Placement([0]), random=random)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
