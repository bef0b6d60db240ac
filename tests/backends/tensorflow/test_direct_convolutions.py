"""Convolutions in groups outside of steps: Keras computes them in a `tf.function` of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from tests.ranks import Pool


def _called(by: str) -> list[list[np.ndarray]]:
    """Outputs and gradients by the kernel, on one device and under data parallel."""
    import keras
    import tensorflow as tf

    import keras_flow as kf

    x = np.random.default_rng(2).normal(size=(5, 6, 4)).astype("float32")
    found = []
    for scope in (contextlib.nullcontext(), kf.DataParallel().scope()):
        with scope:
            layer = keras.layers.Conv1D(6, 2, groups=2, kernel_initializer="ones", use_bias=False)
            if by != "first call":
                layer.build(x.shape)
            with tf.GradientTape() as tape:
                output = keras.ops.conv(x, layer.kernel) if by == "operation" else layer(x)
                loss = tf.reduce_sum(output**2)
            gradient = tape.gradient(
                loss, layer.kernel.value if by == "operation" else layer.trainable_variables[0].value
            )
            found.append([np.asarray(output), np.asarray(gradient)])
    return found


@pytest.mark.parametrize("by", ["first call", "call", "operation"])
def test_groups_are_convolved_outside_of_steps(by: str, on_ranks: Callable[..., Pool]) -> None:
    one, ours = on_ranks("tensorflow")(_called, by)
    for expected, found in zip(one, ours, strict=True):
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)
