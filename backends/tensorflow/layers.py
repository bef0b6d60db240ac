"""Layers on TensorFlow: calls outside of a step, BatchNormalization's statistics, counts that DTensor cannot make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import keras
import numpy as np
import tensorflow as tf
from keras import ops, tree
from keras.backend import epsilon, result_type
from tensorflow.experimental import dtensor

from keras_flow.backends.hooking import always, hook
from keras_flow.backends.rendezvous import meeting
from keras_flow.backends.tensorflow import optimizer
from keras_flow.backends.tensorflow.layouts import in_step, view_of
from keras_flow.backends.tensorflow.mesh_values import is_dtensor, to_logical
from keras_flow.backends.tensorflow.mesh_variables import called_directly, in_a_function, own_device
from keras_flow.backends.tensorflow.mirrored import replica_math
from keras_flow.backends.tensorflow.operators.operations import in_traced_step, on_operation
from keras_flow.backends.tensorflow.optimizer import distribution_by_dtensor
from keras_flow.backends.tensorflow.variables import is_split_over_processes
from keras_flow.current import keras_places
from keras_flow.current.batch_statistics import refuse_renorm
from keras_flow.current.distribution import Distribution, holding
from keras_flow.current.keras_places import in_stateless_scope, in_symbolic_scope
from keras_flow.current.models import distribution_of
from keras_flow.errors import FlowError


def distribution_outside(layer: keras.Layer, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `Layer.__call__`: the distribution of a layer that is called outside of a step.

    None inside of other layers' calls, which were asked already, and where the layer is only described.
    """
    # on a mesh already: a step is running, and its batch was split before
    if in_step() or called_directly.get():
        return None
    is_graph = not tf.executing_eagerly()
    if is_graph and (in_symbolic_scope() or in_stateless_scope()):
        return None
    variables = _computing(layer) if is_graph else layer.variables
    if any(isinstance(getattr(variable, "_value", None), dtensor.DVariable) for variable in variables):
        return distribution_of(layer)
    return None


def _computing(layer: keras.Layer) -> Iterator[keras.Variable]:
    """The weights of a layer, frozen ones too, but not those of layers of input pipelines: `dataset.map` calls these.

    They compute with plain copies of what they have adapted to.
    """
    for part in layer._flatten_layers():
        if not any(keras_places.is_of_keras(base, "layers.preprocessing") for base in type(part).__mro__):
            yield from (*part._trainable_variables, *part._non_trainable_variables)


@hook(
    "keras.Layer",
    "__call__",
    "model(x) outside of a step: one rank computes it, with whole variables; DTensor fails on many operations "
    "when it sees one at a time",
    when=distribution_outside,
)
def call(
    distribution: Distribution, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object
) -> object:
    """Hook on `Layer.__call__`: this process's first rank computes it, with variables that are read whole.

    So what a `tf.GradientTape` watches, plain tensors, is what layers compute with, and whatever TensorFlow can do
    eagerly on one device it does here: gradients twice, `tape.jacobian`, control flow. In a step DTensor sees all
    operations before it lays any out; called one by one it fails on many (a concatenation, steps of an LSTM).

    Raises:
        FlowError: the call is in a `tf.function` of the user's own.
    """
    if not tf.executing_eagerly():
        raise FlowError(in_a_function(f"the weights of {layer.name!r} are"))
    if any(is_split_over_processes(variable) for variable in layer.variables):
        meeting.meet(meeting.CALLS)
    # a layer may change the dict that it is given (RandomCrop does): it gets that one, and no copy, where it can
    if any(map(is_dtensor, tree.flatten((args, kwargs)))):
        args, kwargs = cast("tuple[tuple, dict]", tree.map_structure(to_logical, (args, kwargs)))
    token = called_directly.set(True)
    try:
        with holding(distribution), tf.device(own_device(view_of(distribution).mesh)):
            return original(layer, *args, **kwargs)
    finally:
        called_directly.reset(token)


# ---- BatchNormalization


def rows_of_global(*args: object, **kwargs: object) -> replica_math.ReplicaRows | None:
    """Condition of the hook on `BatchNormalization._moments`: the rows of a replica.

    None where its step does not want statistics of the logical batch.
    """
    rows = replica_math.rows()
    return rows if rows is not None and rows.statistics == "global" else None


def wants_replica_statistics(
    layer: keras.Layer, inputs: object, training: object = None, mask: object = None, **kwargs: object
) -> replica_math.ReplicaRows | Distribution | None:
    """Condition of the hook on `BatchNormalization.call`: what wants statistics by replica.

    The rows of a replica, or the distribution of a step on a mesh.
    """
    if not training or not layer.trainable:
        return None
    rows = replica_math.rows()
    if rows is not None:
        return rows if rows.statistics == "replica" else None
    distribution = distribution_by_dtensor()
    return distribution if distribution is not None and distribution.batch_statistics == "replica" else None


@hook(
    "keras.layers.BatchNormalization",
    "_moments",
    "Keras takes each replica's statistics, or with synchronized=True those without the mask",
    when=rows_of_global,
)
def moments(
    _: object, original: Callable[..., object], layer: keras.Layer, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Hook on `BatchNormalization._moments`: statistics over all replicas, in two passes as on one device."""
    return _mean_and_variance(inputs, mask, layer._reduction_axes, replica_math.total_of)


@hook(
    "keras.layers.BatchNormalization",
    "call",
    "batch_statistics='replica': statistics by data rank, on DTensor too",
    when=wants_replica_statistics,
)
def batch_normalization(
    rows_or_distribution: replica_math.ReplicaRows | Distribution,
    original: Callable[..., object],
    layer: keras.Layer,
    inputs: tf.Tensor,
    training: object = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """Hook on `BatchNormalization.call`: each row by its group's statistics.

    Moving statistics move by the mean of the groups'.

    Groups are the balanced split of the logical rows, also for a batch that every rank computes; empty ones count not.

    Raises:
        FlowError: batch renormalisation, or rows that are not known when the step is traced.
    """
    refuse_renorm(layer)
    inputs = cast("tf.Tensor", ops.cast(inputs, result_type(inputs.dtype, "float32")))
    if not isinstance(rows_or_distribution, Distribution):
        groups = [(inputs, mask)]
        here = tf.cast(cast("int", inputs.shape[0]) > 0, inputs.dtype)
        count = replica_math.total_of(here)
    else:
        groups = _groups(layer, inputs, mask, rows_or_distribution)
        count = tf.cast(len(groups), inputs.dtype)
    moments = [_mean_and_variance(part, part_mask, layer._reduction_axes, tf.identity) for part, part_mask in groups]
    sums = [tf.add_n([group[which] for group in moments]) for which in (0, 1)]
    if not isinstance(rows_or_distribution, Distribution):
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
            "an operation before the layer gives it a tensor of unknown length: let it have a static shape"
        )
    plan = distribution.batch_plan(rows)
    bounds = [plan.block(index) for index in range(plan.replicas)]
    return [(inputs[a:b], None if mask is None else mask[a:b]) for a, b in bounds if b > a]


def _mean_and_variance(
    inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int], total: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance by sums that `total` completes; with a mask as Keras does it, with its epsilon."""
    if mask is None:
        # counted like masked entries: the rows of the other ranks are in the total
        weight = tf.ones_like(inputs)
        used, more = inputs, 0.0
    else:
        weight = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), inputs.dtype)
        used, more = tf.where(weight > 0, inputs, 0), epsilon()
    count = total(tf.reduce_sum(weight, axes, keepdims=True)) + more
    mean = tf.math.divide_no_nan(total(tf.reduce_sum(used, axes, keepdims=True)), count)
    # by the deviations, as Keras does it: a difference of mean squares would lose digits
    squares = tf.where(weight > 0, tf.square(inputs - mean), 0)
    variance = tf.math.divide_no_nan(total(tf.reduce_sum(squares, axes, keepdims=True)), count)
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])


# ---- metrics and preprocessing


@hook(
    "keras:metrics_utils",
    "confusion_matrix",
    "MeanIoU scatters, which DTensor cannot (ScatterNd: expected type int64 != int32)",
    when=optimizer.distribution_by_dtensor,
)
def confusion_matrix(
    _: object,
    original: Callable[..., object],
    labels: tf.Tensor | np.ndarray,
    predictions: tf.Tensor | np.ndarray,
    num_classes: int,
    weights: tf.Tensor | np.ndarray | None = None,
    dtype: str = "int32",
) -> tf.Tensor:
    """Hook on `confusion_matrix`: a product of one-hot matrices; DTensor has no scatter for it."""
    rows = tf.one_hot(tf.cast(labels, "int32"), num_classes)
    columns = tf.one_hot(tf.cast(predictions, "int32"), num_classes)
    if weights is not None:
        columns = columns * tf.cast(weights, "float32")[:, None]
    return tf.cast(tf.matmul(rows, columns, transpose_a=True), dtype)


@on_operation(
    "keras:tf_utils",
    "dense_bincount",
    "CategoryEncoding and IntegerLookup count by DenseBincount, whose result has no shape on a mesh",
)
def dense_bincount(
    _: object,
    original: Callable[..., object],
    inputs: tf.Tensor,
    depth: int,
    binary_output: bool,
    dtype: str,
    count_weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """Hook on `dense_bincount` of preprocessing layers: the sum, or the largest, of one-hot rows.

    DTensor gives the result of DenseBincount no shape. Both leave out values of `depth` and more.
    """
    counts = tf.one_hot(tf.cast(inputs, tf.int64), depth, dtype=dtype)
    if binary_output:
        return tf.reduce_max(counts, -2)
    if count_weights is not None:
        counts *= tf.expand_dims(tf.cast(count_weights, dtype), -1)
    return tf.reduce_sum(counts, -2)


@hook(
    "keras.layers.JaxLayer",
    "_jax2tf_convert",
    "a function of JAX is converted for any number of rows: its results have no static shape, which DTensor needs",
    when=always,  # a layer that is built before the scope converts its function there
)
def convert_function(
    _: object,
    original: Callable[..., Callable[..., object]],
    layer: keras.Layer,
    function: Callable[..., object],
    polymorphic_shapes: Sequence[str],
) -> Callable[..., object]:
    """Hook on `JaxLayer._jax2tf_convert`: in a step of a mesh the function is converted for the shapes that are there.

    Outside of such a step it is Keras's conversion alone.
    """
    for_any_rows = original(layer, function, polymorphic_shapes)

    def converted(*args: object) -> object:
        shapes = [value.shape for value in tree.flatten(args) if tf.is_tensor(value)]
        if in_traced_step() is None or not all(shape.is_fully_defined() for shape in shapes):
            return for_any_rows(*args)
        return original(layer, function, ["..."] * len(polymorphic_shapes))(*args)

    return cast("Callable[..., object]", tf.autograph.experimental.do_not_convert(converted))
