"""Optimizers on TensorFlow: slots lie as their variables, and updates need no strategy of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow import mirrored
from keras_flow.backends.tensorflow.layouts import in_step
from keras_flow.current.distribution import active

#: what an optimizer updates: a Keras variable, or the TensorFlow one that it holds
Target: TypeAlias = keras.Variable | tf.Variable


def described_key(original: Callable[..., object], optimizer: keras.Optimizer, variable: object) -> object:
    """`_var_key` of a variable without a value."""
    return id(variable)


def on_dtensor(*args: object, **kwargs: object) -> bool:
    """Condition: the active distribution works by DTensor."""
    distribution = active()
    return distribution is not None and mirrored.works_by_dtensor(distribution)


def updates_dtensor(optimizer: keras.Optimizer, variable: object, value: object) -> bool:
    """Condition: a dense or sparse update of a variable on a mesh."""
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    return isinstance(variable, dtensor.DVariable)


def add_variable_from_reference(
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    reference_variable: object,
    name: str | None = None,
    initializer: str | keras.Initializer = "zeros",
) -> object:
    """Keras's base method, which hands on the reference's layout; TensorFlow's one colocates, which DTensor cannot."""
    return base_optimizer.BaseOptimizer.add_variable_from_reference(
        optimizer,
        reference_variable,
        name=name,
        initializer=initializer,  # type: ignore[arg-type]  # Keras has no annotation: pyright takes the default's type
    )


def applies_in_step(*args: object, **kwargs: object) -> bool:
    """Condition: gradients are applied inside a step on a mesh."""
    return on_dtensor() and in_step()


def apply(
    original: Callable[..., object], optimizer: keras.Optimizer, grads: list, trainable_variables: list | None = None
) -> object:
    """`Optimizer.apply`: each gradient is laid as its variable before anything else uses it.

    The slices of an embedding's gradient stay slices: Keras takes their norm without adding those of one row up, and
    the numbers are to be those of one device.
    """
    grads = list(grads)
    variables = list(trainable_variables) if trainable_variables is not None else optimizer._trainable_variables
    for index, (gradient, variable) in enumerate(zip(grads, variables, strict=False)):
        target = _plain(variable)
        if gradient is None or not isinstance(target, dtensor.DVariable):
            continue
        if not isinstance(gradient, tf.IndexedSlices):
            grads[index] = dtensor.relayout(tf.convert_to_tensor(gradient), target.layout)
    return original(optimizer, grads, variables if trainable_variables is not None else None)


def backend_update_step(
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    grads: list,
    trainable_variables: list,
    learning_rate: object,
) -> None:
    """One update for each variable; gradients are already those of the logical batch."""
    for gradient, variable in zip(grads, trainable_variables, strict=True):
        if gradient is not None:
            variable = variable.value if isinstance(variable, keras.Variable) else variable
            optimizer.update_step(gradient, variable, learning_rate)


def assign(
    original: Callable[..., object], optimizer: keras.Optimizer, variable: Target, value: tf.Tensor | np.ndarray
) -> None:
    """`assign` of a dense value."""
    _plain(variable).assign(_laid(value, variable))


def assign_add(
    original: Callable[..., object], optimizer: keras.Optimizer, variable: Target, value: tf.Tensor | np.ndarray
) -> None:
    """`assign_add` of a dense value."""
    _plain(variable).assign_add(_laid(value, variable))


def assign_sub(
    original: Callable[..., object], optimizer: keras.Optimizer, variable: Target, value: tf.Tensor | np.ndarray
) -> None:
    """`assign_sub` of a dense value."""
    _plain(variable).assign_sub(_laid(value, variable))


def _plain(variable: Target) -> tf.Variable:
    return variable._value if isinstance(variable, keras.Variable) else variable


def _laid(value: tf.Tensor | np.ndarray, variable: Target) -> tf.Tensor:
    target = _plain(variable)
    value = tf.convert_to_tensor(tf.cast(value, target.dtype))  # IndexedSlices become dense
    return dtensor.relayout(value, target.layout) if in_step() else value
