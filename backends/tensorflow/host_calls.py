"""Python functions called in the middle of a compiled step, on TensorFlow: a function of NumPy in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def dense(gradient: Any) -> Any:
    """The gradient as a tensor: that of an embedding is rows and their indices."""
    return tf.convert_to_tensor(gradient)


def call_in_step(function: Callable[[list[Any]], list[Any]], values: Sequence[Any]) -> list[Any]:
    """Call a function of tensors in a step, compiled or not; it returns tensors of the same dtypes and shapes.

    Steps are not compiled by XLA (`jit_compile=True`), which has no such calls.
    """
    if tf.executing_eagerly():
        return function(list(values))

    def run(*arrays: Any) -> list[Any]:
        return [tf.convert_to_tensor(each).numpy() for each in function([tf.constant(each) for each in arrays])]

    results = tf.numpy_function(run, list(values), [each.dtype for each in values])
    for result, value in zip(results, values, strict=True):
        result.set_shape(value.shape)
    return list(results)
