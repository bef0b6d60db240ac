"""Layers on TensorFlow: models called outside of a step, and the confusion matrix of metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow import mirrored
from keras_flow.backends.tensorflow.data import is_numpy_like, lay_batch
from keras_flow.backends.tensorflow.layouts import on_mesh, view_of
from keras_flow.backends.tensorflow.variables import is_dtensor, pack, to_logical
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.models import distribution_of, is_built


def distribution_outside(layer: keras.Layer, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `Layer.__call__`: the distribution of a layer with variables on a mesh that is called
    eagerly, outside of a step and of other layers."""
    if not tf.executing_eagerly() or dtensor.get_default_mesh() is not None:
        return None
    if global_state.get_global_attribute("current_call_ctx") is not None:
        return None
    if not any(is_numpy_like(value) for value in tree.flatten((args, kwargs))):
        return None
    distribution = active()
    if distribution is not None and not is_built(layer):  # its variables are made in this call
        return distribution if mirrored.works_by_dtensor(distribution) else None
    on_mesh = any(isinstance(getattr(variable, "_value", None), dtensor.DVariable) for variable in layer.variables)
    return distribution_of(layer) if on_mesh else None


def call(
    distribution: Distribution, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object
) -> object:
    """`Layer.__call__` on plain values: they are laid as a batch, the result is the logical one as plain tensors."""
    flat = tree.flatten((args, kwargs))
    plain = [index for index, value in enumerate(flat) if is_numpy_like(value)]
    tensors = [layer.dtype_policy.convert_input(flat[index], layer.autocast, layer.input_dtype) for index in plain]
    laid = _to_mesh(tensors, distribution)
    for index, tensor in zip(plain, laid, strict=True):
        flat[index] = tensor
    args, kwargs = tree.pack_sequence_as((args, kwargs), flat)
    with distribution.scope(), on_mesh(view_of(distribution).mesh):
        outputs = original(layer, *args, **kwargs)
    return tree.map_structure(_from_mesh, outputs)


def _to_mesh(tensors: Sequence[object], distribution: Distribution) -> list[tf.Tensor]:
    return list(lay_batch(tensors, distribution).data)  # type: ignore[call-overload]


def _from_mesh(output: object) -> object:
    """The logical value of a DTensor; the gradient goes back to the mesh."""
    if not is_dtensor(output):
        return output
    layout = dtensor.fetch_layout(output)

    @tf.custom_gradient
    def logical(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            whole = dtensor.Layout.replicated(layout.mesh, upstream.shape.rank)
            return pack([upstream] * layout.mesh.num_local_devices(), whole)

        return to_logical(value), gradient

    return logical(output)


def confusion_matrix(
    _: object,
    original: Callable[..., object],
    labels: tf.Tensor | np.ndarray,
    predictions: tf.Tensor | np.ndarray,
    num_classes: int,
    weights: tf.Tensor | np.ndarray | None = None,
    dtype: str = "int32",
) -> tf.Tensor:
    """`confusion_matrix` as a product of one-hot matrices; DTensor has no scatter for it."""
    rows = tf.one_hot(tf.cast(labels, "int32"), num_classes)
    columns = tf.one_hot(tf.cast(predictions, "int32"), num_classes)
    if weights is not None:
        columns = columns * tf.cast(weights, "float32")[:, None]
    return tf.cast(tf.matmul(rows, columns, transpose_a=True), dtype)


def dense_bincount(
    _: object,
    original: Callable[..., object],
    inputs: tf.Tensor,
    depth: int,
    binary_output: bool,
    dtype: str,
    count_weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """`dense_bincount` of preprocessing layers as a sum, or the largest, of one-hot rows: DTensor gives the result of
    DenseBincount no shape. Both leave out values of `depth` and more."""
    found = tf.one_hot(tf.cast(inputs, tf.int64), depth, dtype=dtype)
    if binary_output:
        return tf.reduce_max(found, -2)
    if count_weights is not None:
        found *= tf.expand_dims(tf.cast(count_weights, dtype), -1)
    return tf.reduce_sum(found, -2)
