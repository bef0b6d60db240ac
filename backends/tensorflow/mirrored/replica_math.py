"""The mathematics of one replica of MirroredStrategy, made that of the logical batch.

Keras 3.15 takes means of replica means (wrong where counts differ), clips each replica's gradient before the sum, draws
the same dropout mask on every replica and normalises by local statistics. Each function here replaces one of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar, cast

import keras
import tensorflow as tf
from keras import ops
from keras.backend import result_type

from keras_flow.backends import states
from keras_flow.backends.engine_records import RandomPart
from keras_flow.backends.hooking import hook
from keras_flow.backends.logical_random import has_one_mask
from keras_flow.current.keras_places import squeeze_or_expand_to_same_rank
from keras_flow.current.keras_places import tensorflow_random as keras_random
from keras_flow.current.models import layer_in_call
from keras_flow.errors import FlowError
from keras_flow.scoped import setting

_SUM = tf.distribute.ReduceOp.SUM
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ReplicaRows:
    """The rows of one replica.

    Attributes:
        first: index of its first row in the logical batch.
        count: number of its rows.
        total: rows of the logical batch.
        statistics: `"global"` or `"replica"`, over which rows BatchNormalization takes its statistics.
    """

    first: int
    count: int
    total: int
    statistics: str


_rows: ContextVar[ReplicaRows | None] = ContextVar("keras_flow_replica_rows", default=None)
_summed: ContextVar[bool] = ContextVar("keras_flow_gradients_summed", default=False)


def rows_here(rows: ReplicaRows) -> AbstractContextManager[None]:
    """A replica's step runs inside, in a thread of its own."""
    return setting(_rows, rows)


def rows(*args: object, **kwargs: object) -> ReplicaRows | None:
    """The rows of the replica whose step is running, or None; also the condition of hooks on a replica's step."""
    return _rows.get()


def without_rows(*args: object, **kwargs: object) -> ReplicaRows | None:
    """Condition of the hook on `add`: a replica that has no rows, where a batch has fewer rows than replicas."""
    here = rows()
    return here if here is not None and here.count == 0 else None


@hook("keras:numpy", "add", "Keras takes a tensor [0, n] for a bias of length n", when=without_rows)
def add(_: object, original: Callable[..., tf.Tensor], x1: tf.Tensor, x2: tf.Tensor) -> tf.Tensor:
    """Hook on `add`: a sum of tensors without rows."""
    first, second = (cast("tf.Tensor", ops.convert_to_tensor(x)) for x in (x1, x2))
    dtype = result_type(first.dtype, second.dtype)
    return tf.add(tf.cast(first, dtype), tf.cast(second, dtype))


@hook(
    "keras:nn",
    ("conv", "conv_transpose", "depthwise_conv", "separable_conv"),
    "a convolution of no rows has the channels of its input",
    when=without_rows,
)
def convolve(
    _: object, original: Callable[..., tf.Tensor], inputs: tf.Tensor, *args: object, **kwargs: object
) -> tf.Tensor:
    """Hook on convolutions: of no rows, by way of a row of zeros, so that kernels have gradients, which are zeros.

    With oneDNN TensorFlow 2.21 convolves a tensor [0, 2, 2, 3] by 4 filters to [0, 2, 2, 3].
    """
    inputs = tf.convert_to_tensor(inputs)
    row = tf.zeros([1, *inputs.shape[1:]], inputs.dtype)
    return original(tf.concat([inputs, row], 0), *args, **kwargs)[:0]


def total_of(value: _Value) -> _Value:
    """The sum of a tensor, or of each in a list, over the replicas; differentiable."""
    return tf.distribute.get_replica_context().all_reduce(_SUM, value)


# ---- losses


#: a hook on what a replica of `strategy="mirrored"` computes
_in_replica = functools.partial(hook, when=rows)


@_in_replica(
    "keras:losses", "reduce_values", "Keras takes the mean of replica means, which is wrong where their counts differ"
)
def reduce_values(
    _: object,
    original: Callable[..., object],
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
) -> object:
    """Hook on `losses.reduce_values`: divide the replica's sum by the count of all replicas."""
    # whose log is a mean, its gradient that of a sum: terms beside it would count once for each row
    if reduction in (None, "none"):
        raise FlowError(
            'strategy="mirrored": a loss with reduction=None has a number for each row, of which a replica has its own '
            'alone; take reduction="sum" (the same gradient), or the default strategy (kf.DataParallel() without '
            "strategy)"
        )
    # Keras leaves values of shape [0] as they are, which a replica without rows has
    if reduction == "sum":
        return ops.sum(values) if tuple(values.shape) == (0,) else original(values, sample_weight, reduction)
    # rows are summed already, perhaps with a division that one replica cannot undo
    if tuple(values.shape) == ():
        raise FlowError(
            'strategy="mirrored": a loss returns one number for the batch, which a replica cannot compute from its own '
            "rows; use the default strategy (kf.DataParallel() without strategy)"
        )
    loss = cast("tf.Tensor", ops.sum(values))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        count = ops.sum(sample_weight)
    else:
        count = tf.size(values)
    # the count of all replicas, so that the replicas' losses and gradients add up to the logical ones
    return ops.divide_no_nan(loss, tf.stop_gradient(total_of(ops.cast(count, loss.dtype))))


@_in_replica("keras:losses", "apply_mask", "Keras weights masked rows by the counts of one replica")
def apply_mask(
    _: object,
    original: Callable[..., object],
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None,
    dtype: str,
    reduction: str | None,
) -> object:
    """Hook on `losses.apply_mask`: count total and valid entries of all replicas."""
    # other reductions divide by no count of entries
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype, reduction)
    total = total_of(ops.cast(tf.size(mask), dtype))
    valid = total_of(ops.sum(ops.cast(mask, dtype)))
    weight = ops.where(ops.cast(mask, "bool"), ops.divide_no_nan(total, valid), 0)
    if sample_weight is None:
        return weight
    same_rank = squeeze_or_expand_to_same_rank(weight, ops.cast(sample_weight, dtype))
    weight, sample_weight = cast("tuple[tf.Tensor, tf.Tensor]", same_rank)
    return sample_weight * weight


@_in_replica("keras:losses", "scale_loss_for_distribution", "added losses count by rows, not by replicas")
def scale_loss(here: ReplicaRows, original: Callable[..., object], value: tf.Tensor) -> tf.Tensor:
    """Hook on `scale_loss_for_distribution`: an added loss counts by the share of rows (Keras: all replicas alike).

    It is then the logical one for a mean over rows and for a loss of weights alone.
    """
    return value * tf.cast(here.count / here.total, value.dtype)


@_in_replica(
    "keras:losses",
    "unscale_loss_for_distribution",
    "trackers see the logical loss, not the local one times the number of replicas",
)
def unscale_loss(_: object, original: Callable[..., object], value: tf.Tensor) -> tf.Tensor:
    """Hook on `unscale_loss_for_distribution`: the logical loss on every replica."""
    return total_of(value)


# ---- gradients


@_in_replica("keras.Optimizer", "apply", "Keras clips and accumulates a replica's gradient before the sum")
@_in_replica(
    "keras.optimizers.LossScaleOptimizer", "apply", "Keras clips and accumulates a replica's gradient before the sum"
)
def apply(
    _: object,
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    grads: list,
    trainable_variables: list | None = None,
) -> object:
    """Hook on `BaseOptimizer.apply`: sum gradients before they are clipped, accumulated or tested for overflow."""
    if _summed.get():
        return original(optimizer, grads, trainable_variables)
    # one sum of all gradients: a collective for each would wait for the slowest replica each time
    grads = list(grads)
    variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
    # what is no gradient but a variable's next value is no summand: a difference is found (`states.compare`)
    used = [
        index
        for index, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
        if gradient is not None and not states.is_overwritten(variable)
    ]
    # slices of embeddings stay slices, those of all replicas: Keras squares them before it adds up those of one row
    for index, gradient in zip(used, total_of([grads[index] for index in used]), strict=True):
        grads[index] = gradient
    # `apply` of a wrapper (LossScaleOptimizer) calls that of the optimizer inside: summed once is enough
    token = _summed.set(True)
    try:
        return original(optimizer, grads, trainable_variables)
    finally:
        _summed.reset(token)


@_in_replica("keras.Optimizer", "_all_reduce_sum_gradients", "gradients are summed once, by `apply`")
def keep_gradients(_: object, original: Callable[..., list], optimizer: keras.Optimizer, grads_and_vars: list) -> list:
    """Hook on `TFOptimizer._all_reduce_sum_gradients`: nothing is left to sum."""
    return grads_and_vars if _summed.get() else original(optimizer, grads_and_vars)


# ---- random values


@_in_replica("keras:random", "dropout", "Keras draws the same mask on every replica")
def dropout(
    here: ReplicaRows,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    rate: float,
    noise_shape: Sequence[int | None] | None = None,
    seed: object = None,
) -> tf.Tensor:
    """Hook on `random.dropout`: the replica's own rows of the mask of the logical batch."""
    if rate in (0.0, 1.0):
        return original(inputs, rate, noise_shape, seed)
    # the seed of one device: Keras draws it once for the layer, whatever the replica
    words = cast("tf.Tensor", keras_random._cast_seed(keras_random.draw_seed(seed)))
    # lengths that the noise leaves open are those of the inputs, of this replica's rows
    lengths = cast("Sequence[int]", ops.shape(inputs))
    asked = noise_shape or [None] * len(lengths)
    shape = [length if value is None else value for length, value in zip(lengths, asked, strict=True)]
    shape = _with_own_rows(shape, inputs, here)
    if has_one_mask(noise_shape, here.count):
        noise = tf.random.stateless_uniform(shape, seed=words, dtype=inputs.dtype)
    else:
        noise = _own_rows(lambda whole: tf.random.stateless_uniform(whole, seed=words, dtype=inputs.dtype), shape, here)
    return tf.where(noise >= rate, inputs * (1.0 / (1.0 - rate)), tf.zeros_like(inputs))


@_in_replica("keras:random", ("gamma", "beta", "binomial", "categorical", "shuffle"), "MixUp mixes rows of one replica")
@_in_replica("keras:image", "elastic_transform", "draws without Keras's random functions: the same on every replica")
def refuse_draw(_: object, original: Callable[..., tf.Tensor], *args: object, **kwargs: object) -> tf.Tensor:
    """Hook on `gamma`, `shuffle` and other draws that a replica cannot make from its own rows.

    Those are an order of all rows, or values that may be one for all.

    Raises:
        FlowError: always.
    """
    layer = layer_in_call()
    of = "" if layer is None else f" of layer {getattr(layer, 'name', layer)!r} ({type(layer).__name__})"
    raise FlowError(
        f'strategy="mirrored": {original.__name__}{of} draws for the logical batch, and a replica sees '
        "its own rows only; use the default strategy (kf.DataParallel() without strategy)"
    )


@_in_replica(
    "keras:random",
    ("normal", "uniform", "truncated_normal", "randint"),
    "Keras draws the same numbers on every replica",
)
def draw(
    here: ReplicaRows, original: Callable[..., tf.Tensor], shape: Sequence[int], *args: object, **kwargs: object
) -> tf.Tensor:
    """Hook on `random.normal` and the like: the replica's own rows of the draw of the logical batch."""
    shape = list(shape)
    if not _has_rows(shape, here.count):
        return original(shape, *args, **kwargs)
    return _own_rows(lambda whole: original(whole, *args, **kwargs), shape, here)


def part_of_draw(
    shape: tuple[int, ...], inputs: tf.Tensor | None, noise_shape: Sequence[int | None] | None, here: ReplicaRows
) -> RandomPart | None:
    """The elements of a draw by logical index that a replica makes; None where its rows cannot be told."""
    if shape and not isinstance(shape[0], int):
        return None
    if inputs is not None and has_one_mask(noise_shape, here.count):
        return RandomPart.whole(shape)
    if inputs is not None:
        shape = tuple(_with_own_rows(shape, inputs, here))
    if not _has_rows(list(shape), here.count):
        return RandomPart.whole(shape)
    times = shape[0] // here.count if here.count else 0
    rows = slice(here.first * times, (here.first + here.count) * times)
    return RandomPart((here.total * times, *shape[1:]), (rows, *(slice(0, length) for length in shape[1:])))


def _with_own_rows(shape: Sequence[int], inputs: tf.Tensor, here: ReplicaRows) -> list[int]:
    """The shape of a mask; where the user names the rows of the logical batch, with those of this replica."""
    own: int | None = inputs.shape[0]
    if not shape or own is None:
        return list(shape)
    logical = own * here.total // here.count if here.count else here.total
    return [own if shape[0] == logical else shape[0], *shape[1:]]


def _has_rows(shape: list, count: int) -> bool:
    return (bool(shape) and isinstance(shape[0], int) and count > 0 and shape[0] % count == 0) or shape[:1] == [0]


def _own_rows(make: Callable[[list], tf.Tensor], shape: list, here: ReplicaRows) -> tf.Tensor:
    """Rows of a logical draw whose first dim is the batch, or the batch times other dims."""
    if not isinstance(shape[0], int) or (here.count and shape[0] % here.count):
        raise FlowError(
            f'strategy="mirrored": a random layer draws a tensor of shape {shape}, whose first dim is not the batch; '
            "use the default strategy (kf.DataParallel() without strategy)"
        )
    # a replica without rows still gives a tensor of the right dtype to the operations that follow
    if here.count == 0:
        return tf.zeros(shape, make([1, *shape[1:]]).dtype)
    # a layer may have merged rows with time steps: the first dim is `times` entries for each row
    times = shape[0] // here.count
    return make([here.total * times, *shape[1:]])[here.first * times : (here.first + here.count) * times]
