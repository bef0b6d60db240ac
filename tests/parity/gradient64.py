"""Gradients in float64 on one device: the proof that a variable's gradient is zero in mathematics."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np


def largest_gradients(
    build: Callable[[], keras.Model],
    x: np.ndarray,
    y: np.ndarray,
    loss: Callable[[], keras.losses.Loss],
    endings: tuple[str, ...],
) -> dict[str, float]:
    """Largest |gradient| of the variables whose paths end so, in float64, without dropout.

    Args:
        build: makes the model.
        x: a batch.
        y: its targets.
        loss: makes the loss.
        endings: endings of variable paths.
    """
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        gradients = _ENGINES[keras.backend.backend()](build, x, y, loss)
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(floatx)
    return {
        ending: max(float(np.abs(value).max()) for path, value in gradients.items() if path.endswith(ending))
        for ending in endings
    }


def _jax(build, x, y, loss) -> dict[str, np.ndarray]:
    import jax

    with jax.enable_x64(True):
        model = build()
        values = [v.value for v in model.trainable_variables]
        other = [v.value for v in model.non_trainable_variables]
        gradient = jax.grad(lambda w: loss()(y, model.stateless_call(w, other, x, training=False)[0]))
        grads = jax.jit(gradient)(values)  # one program; operation by operation each would be compiled
        return {v.path: np.asarray(g) for v, g in zip(model.trainable_variables, grads, strict=True)}


def _tensorflow(build, x, y, loss) -> dict[str, np.ndarray]:
    import tensorflow as tf

    model = build()
    with tf.GradientTape() as tape:
        value = loss()(y, model(x, training=False))
    grads = tape.gradient(value, [v.value for v in model.trainable_variables])
    return {v.path: tf.convert_to_tensor(g).numpy() for v, g in zip(model.trainable_variables, grads, strict=True)}


def _torch(build, x, y, loss) -> dict[str, np.ndarray]:
    model = build()
    loss()(y, model(x, training=False)).backward()
    return {v.path: v.value.grad.cpu().numpy() for v in model.trainable_variables}


_ENGINES = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
