"""Exporting on TensorFlow: plain values of variables."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


def plain_value(variable: keras.Variable, value: np.ndarray) -> tf.Variable:
    """A `tf.Variable` on the default device."""
    return tf.Variable(
        value,  # type: ignore[arg-type]  # an array is taken too
        dtype=variable._dtype,
        trainable=variable.trainable,
        name=variable.name,
    )


def track(model: keras.Model) -> None:
    """Nothing: what is exported tracks Keras's variables."""
