"""Convolutions and pools in a step on a mesh: split by rows only, and made of what DTensor partitions by rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow import variables
from keras_flow.backends.tensorflow.layouts import in_step, relayout, replicated, view_of
from keras_flow.backends.tensorflow.mirrored import strategy
from keras_flow.backends.tensorflow.operators.operations import by_rows
from keras_flow.current.distribution import Distribution, active, expected
from keras_flow.current.keras_places import standardize_data_format


def distribution_of_step(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on convolutions and pools: the distribution of the step on a mesh that is running."""
    distribution = active()
    if distribution is None or not strategy.works_by_dtensor(distribution):
        return None
    return distribution if in_step() else None


def read_kernel(inputs: object, kernel: Any, *args: object, **kwargs: object) -> tf.Tensor | None:
    """Condition of the hook on `conv` outside of steps: the plain value of a kernel that is on a mesh."""
    on_mesh = variables.read_directly(getattr(kernel, "_value", kernel))
    return None if on_mesh is None else tf.convert_to_tensor(kernel)


#: a hook on what convolves or pools, in a step that is traced for a mesh
on_windows = functools.partial(
    hook,
    why="DTensor's convolutions and pools hold tensors split by rows only; weights nearby split them. It has no "
    "dilated ones, none in groups on CPUs without oneDNN, and no gradient of depthwise ones and of average pools",
    when=distribution_of_step,
)


@on_windows("keras:nn", "max_pool")
def max_pool(
    _: object, original: Callable[..., tf.Tensor], inputs: tf.Tensor, *args: object, **kwargs: object
) -> tf.Tensor:
    """Hook on `max_pool`: its input and output are split by rows only."""
    return by_rows_only(original, inputs, *args, **kwargs)


def by_rows_only(original: Callable[..., tf.Tensor], inputs: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
    """A convolution or pool between tensors that are split by rows only."""
    return by_rows(original(by_rows(tf.convert_to_tensor(inputs)), *args, **kwargs))


def whole_kernel(kernel: tf.Tensor | keras.Variable) -> tf.Tensor:
    """A kernel that every rank has whole, and whose gradient is: only then DTensor has rules for both."""
    kernel = tf.convert_to_tensor(kernel)
    return relayout(kernel, replicated(view_of(expected()).mesh, kernel.shape.rank))


@on_windows("keras:nn", "conv_transpose")
def convolve_transposed(
    _: object,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    kernel: tf.Tensor | keras.Variable,
    *args: object,
    **kwargs: object,
) -> tf.Tensor:
    """Hook on `conv_transpose`: its input and output are split by rows only."""
    return by_rows_only(original, inputs, whole_kernel(kernel), *args, **kwargs)


@on_windows("keras:nn", "conv")
def convolve(
    distribution: Distribution,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    kernel: tf.Tensor | keras.Variable,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> tf.Tensor:
    """Hook on `conv`, and on `depthwise_conv` where its window is large.

    Groups are convolved one by one on CPUs, dilated kernels as undilated ones of the phases of the positions.

    Keras compiles a grouped convolution with XLA, which DTensor does not do, and without XLA or oneDNN TensorFlow has
    none on CPUs.
    """
    # DTensor's rule wants whole kernels ("Filter for convolution must have fully replicated layout")
    inputs, kernel = by_rows(tf.convert_to_tensor(inputs)), whole_kernel(kernel)
    data_format = standardize_data_format(data_format)
    spatial = cast(int, inputs.shape.rank) - 2
    rates = (dilation_rate,) * spatial if isinstance(dilation_rate, int) else tuple(dilation_rate or (1,) * spatial)
    last = data_format == "channels_last"
    # a dilated convolution can be taken apart only where every length is known, and the stride is 1
    known = last and inputs.shape.is_fully_defined() and strides in (1, (1,) * spatial, [1] * spatial)

    def plain(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        if known and max(rates) > 1:
            return _dilated(lambda *part: original(*part, 1, "valid", data_format, 1), values, weights, padding, rates)
        return original(values, weights, strides, padding, data_format, dilation_rate)

    # the kernel is [*sizes, channels of a group, filters], whatever the data format
    channels = inputs.shape[-1 if last else 1]
    groups = channels // cast(int, kernel.shape[-2]) if channels else 1
    if groups == 1 or distribution.placement.type != "cpu":
        return by_rows(plain(inputs, kernel))
    axis = spatial + 1 if last else 1
    pairs = zip(tf.split(inputs, groups, axis), tf.split(kernel, groups, spatial + 1), strict=True)
    return by_rows(tf.concat([plain(values, weights) for values, weights in pairs], axis))


@hook(
    "keras:nn",
    "conv",
    "groups are convolved in a tf.function of Keras's own, which would read the kernel inside",
    when=read_kernel,
)
def convolve_directly(
    read: tf.Tensor, original: Callable[..., tf.Tensor], inputs: object, _: object, *args: object, **kwargs: object
) -> tf.Tensor:
    """Hook on `conv`: the kernel is read before it."""
    return original(inputs, read, *args, **kwargs)


def _dilated(
    convolution: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    padding: str,
    rates: Sequence[int],
) -> tf.Tensor:
    """A dilated convolution of stride 1, channels last: each phase of the positions is convolved by itself.

    TensorFlow does the same by SpaceToBatchND, which puts the phases before the rows: DTensor cannot split that by
    rows. Here they follow the rows, so that each rank convolves its own.

    Example:
        Rate 2: positions 0 1 2 3 4 5 of a row are two rows, 0 2 4 and 1 3 5.
    """
    rows, *lengths, channels = cast("list[int]", inputs.shape.as_list())
    # how far the window reaches beyond its first position: a kernel of 3 at rate 2 spans 5 positions, reach 4
    reach = [(size - 1) * rate for size, rate in zip(cast("list[int]", kernel.shape.as_list()), rates, strict=False)]
    # TensorFlow's "same" padding: half of the reach before, the larger half after
    before = [total // 2 if padding == "same" else 0 for total in reach]
    padded = [length + (total if padding == "same" else 0) for length, total in zip(lengths, reach, strict=True)]
    # positions of the longest phase; shorter phases are filled up with zeros, cut off again at the end
    counts = [math.ceil(length / rate) for length, rate in zip(padded, rates, strict=True)]
    after = [
        count * rate - length - first for count, rate, length, first in zip(counts, rates, lengths, before, strict=True)
    ]
    inputs = tf.pad(inputs, [[0, 0], *([a, b] for a, b in zip(before, after, strict=True)), [0, 0]])
    dims = len(lengths)
    # after the reshape the dims are [rows, count, rate, count, rate, ..., channels]
    positions, phases = [1 + 2 * dim for dim in range(dims)], [2 + 2 * dim for dim in range(dims)]
    pairs = [length for pair in zip(counts, rates, strict=True) for length in pair]
    phased = tf.transpose(tf.reshape(inputs, [rows, *pairs, channels]), [0, *phases, *positions, 1 + 2 * dims])
    outputs = convolution(tf.reshape(phased, [rows * math.prod(rates), *counts, channels]), kernel)
    *positions, features = cast("list[int]", outputs.shape.as_list())[1:]
    # back from [rows, rates, positions] to [rows, position, rate, ...], so that a reshape joins each pair
    joined = [dim for pair in zip(range(1 + dims, 1 + 2 * dims), range(1, 1 + dims), strict=True) for dim in pair]
    outputs = tf.transpose(tf.reshape(outputs, [rows, *rates, *positions, features]), [0, *joined, 1 + 2 * dims])
    outputs = tf.reshape(outputs, [rows, *(a * b for a, b in zip(positions, rates, strict=True)), features])
    # what a "valid" convolution of the padded input gives: reach fewer positions; the rest came from filling up
    ends = [length - total for length, total in zip(padded, reach, strict=True)]
    return tf.slice(outputs, [0] * (dims + 2), [rows, *ends, features])
