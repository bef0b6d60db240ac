"""Statistics of BatchNormalization: over the logical batch, or over the rows of each data rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import keras
import tensorflow as tf
from keras.src import ops
from keras.src.backend import epsilon, result_type

from keras_flow.backends.tensorflow import replica_math
from keras_flow.backends.tensorflow.optimizer import distribution_by_dtensor
from keras_flow.current.distribution import Distribution
from keras_flow.errors import FlowError


def rows_of_global(*args: object, **kwargs: object) -> replica_math.Rows | None:
    """Condition of the hook on `BatchNormalization._moments`: the rows of a replica whose step wants statistics of the
    logical batch."""
    rows = replica_math.rows()
    return rows if rows is not None and rows.statistics == "global" else None


def wants_replica_statistics(
    layer: keras.Layer, inputs: object, training: object = None, mask: object = None, **kwargs: object
) -> replica_math.Rows | Distribution | None:
    """Condition of the hook on `BatchNormalization.call`: the rows of a replica, or the distribution of a step on a
    mesh, where it wants statistics by replica."""
    if not training or not layer.trainable:
        return None
    rows = replica_math.rows()
    if rows is not None:
        return rows if rows.statistics == "replica" else None
    distribution = distribution_by_dtensor()
    return distribution if distribution is not None and distribution.batch_statistics == "replica" else None


def global_moments(
    _: object, original: Callable[..., object], layer: keras.Layer, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """`BatchNormalization._moments` over all replicas, in two passes as on one device."""
    return _moments(inputs, mask, layer._reduction_axes, replica_math.total_of)


def call_by_groups(
    found: replica_math.Rows | Distribution,
    original: Callable[..., object],
    layer: keras.Layer,
    inputs: tf.Tensor,
    training: object = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """`BatchNormalization.call`: each row by its group's statistics, moving statistics by the mean of the groups'.

    Groups are the balanced split of the logical rows, also for a batch that every rank computes; empty ones count not.

    Raises:
        FlowError: batch renormalisation, or rows that are not known when the step is traced.
    """
    if layer.renorm:
        raise FlowError(f'layer {layer.name!r}: renorm=True needs batch_statistics="global"')
    inputs = cast("tf.Tensor", ops.cast(inputs, result_type(inputs.dtype, "float32")))
    if not isinstance(found, Distribution):
        groups = [(inputs, mask)]
        here = tf.cast(cast("int", inputs.shape[0]) > 0, inputs.dtype)
        count = replica_math.total_of(here)
    else:
        groups = _groups(layer, inputs, mask, found)
        count = tf.cast(len(groups), inputs.dtype)
    moments = [_moments(part, part_mask, layer._reduction_axes, tf.identity) for part, part_mask in groups]
    sums = [tf.add_n([group[which] for group in moments]) for which in (0, 1)]
    if not isinstance(found, Distribution):
        sums = [replica_math.total_of(total) for total in sums]  # an empty replica's are 0
    for moving, total in zip((layer.moving_mean, layer.moving_variance), sums, strict=True):
        old = ops.cast(moving, inputs.dtype)
        moving.assign(old * layer.momentum + total / count * (1.0 - layer.momentum))
    gamma = ops.cast(layer.gamma, inputs.dtype) if layer.scale else None
    beta = ops.cast(layer.beta, inputs.dtype) if layer.center else None
    normalized = [
        ops.batch_normalization(part, mean, variance, layer.axis, offset=beta, scale=gamma, epsilon=layer.epsilon)
        for (part, _), (mean, variance) in zip(groups, moments, strict=True)
    ]
    outputs = cast("list[tf.Tensor]", normalized)
    joined = outputs[0] if len(outputs) == 1 else tf.concat(outputs, 0)
    return cast("tf.Tensor", ops.cast(joined, layer.compute_dtype))


def _groups(
    layer: keras.Layer, inputs: tf.Tensor, mask: tf.Tensor | None, distribution: Distribution
) -> list[tuple[tf.Tensor, tf.Tensor | None]]:
    rows = inputs.shape[0]
    if rows is None:
        raise FlowError(
            f'layer {layer.name!r}: batch_statistics="replica" needs the number of rows when a step is traced, and '
            "this data has batches of many sizes; give batches of one size"
        )
    plan = distribution.batch_plan(rows)
    bounds = [plan.block(index) for index in range(plan.replicas)]
    return [(inputs[a:b], None if mask is None else mask[a:b]) for a, b in bounds if b > a]


def _moments(
    inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int], total: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance by sums that `total` completes; with a mask as Keras does it, with its epsilon."""
    if mask is None:
        weight = tf.ones_like(inputs)
        used, more = inputs, 0.0
    else:
        weight = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), inputs.dtype)
        used, more = tf.where(weight > 0, inputs, 0), epsilon()
    count = total(tf.reduce_sum(weight, axes, keepdims=True)) + more
    mean = tf.math.divide_no_nan(total(tf.reduce_sum(used, axes, keepdims=True)), count)
    squares = tf.where(weight > 0, tf.square(inputs - mean), 0)
    variance = tf.math.divide_no_nan(total(tf.reduce_sum(squares, axes, keepdims=True)), count)
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
