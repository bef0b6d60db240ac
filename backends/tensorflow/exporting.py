"""Exporting on TensorFlow: plain values of variables."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


def plain_value(variable: keras.Variable, value: np.ndarray, before: object = None) -> tf.Variable:
    """A `tf.Variable` on the default device: that of before, which a traced function reads, with this value."""
    if isinstance(before, tf.Variable):
        before.assign(value)
        return before
    return tf.Variable(
        value,  # type: ignore[arg-type]  # an array is taken too
        dtype=variable._dtype,
        trainable=variable.trainable,
        name=variable.name,
    )


def track(model: keras.Layer) -> None:
    """Nothing: what is exported tracks Keras's variables."""
