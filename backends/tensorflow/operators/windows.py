"""Depthwise convolutions and average pools as sums over the positions of their window, which DTensor splits by rows.

It has no rule for their gradients (DepthwiseConv2dNativeBackpropFilter, AvgPoolGrad): every rank would gather all rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from keras_flow.backends.tensorflow.convolutions import by_rows_only, convolve, on_windows, whole_kernel
from keras_flow.backends.tensorflow.operators.operations import by_rows, without_rule
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import engine_nn as nn
from keras_flow.current.keras_places import standardize_data_format

#: larger windows are left to TensorFlow: a step would have several operations for each position
_MOST_POSITIONS = 27


@dataclass(frozen=True)
class Window:
    """A window that slides over the spatial dims of a tensor [rows, *lengths, channels].

    Attributes:
        lengths: lengths of the tensor's spatial dims.
        sizes: positions of the window along each dim.
        strides: steps of the window.
        rates: distances of its positions.
        is_same: whether the tensor is padded, so that there is an output for each stride.
    """

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rates: tuple[int, ...]
    is_same: bool

    @property
    def outputs(self) -> tuple[int, ...]:
        """Places of the window along each dim."""
        if self.is_same:
            return tuple(math.ceil(a / b) for a, b in zip(self.lengths, self.strides, strict=True))
        dims = zip(self.lengths, self.sizes, self.strides, self.rates, strict=True)
        return tuple((length - (size - 1) * rate - 1) // stride + 1 for length, size, stride, rate in dims)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """Zeros before and after each dim."""
        dims = zip(self.lengths, self.outputs, self.sizes, self.strides, self.rates, strict=True)
        totals = [max((n - 1) * stride + (size - 1) * rate + 1 - length, 0) for length, n, size, stride, rate in dims]
        return [(total // 2, total - total // 2) if self.is_same else (0, 0) for total in totals]

    def positions(self, inputs: tf.Tensor) -> Iterator[tuple[tuple[int, ...], tf.Tensor]]:
        """Each position of the window, with the values under it at all places: [rows, *outputs, channels]."""
        # a pad that pads nothing would still be an operation of the step
        if any(map(any, self.padding)):
            inputs = tf.pad(inputs, [(0, 0), *self.padding, (0, 0)])
        for position in itertools.product(*map(range, self.sizes)):
            dims = zip(position, self.outputs, self.strides, self.rates, strict=True)
            # of the padded input: for position 1, rate 2, stride 3 the entries 2, 5, 8, ...
            cuts = (slice(at * rate, at * rate + (n - 1) * stride + 1, stride) for at, n, stride, rate in dims)
            yield position, inputs[(slice(None), *cuts, slice(None))]

    @property
    def is_small(self) -> bool:
        """Whether it has places, and few positions."""
        return math.prod(self.sizes) <= _MOST_POSITIONS and min(self.outputs) > 0

    def counts(self) -> np.ndarray:
        """Entries of the tensor in the window at each place, without padding: [1, *outputs, 1]."""
        # computed when the step is traced: the counts depend on shapes only
        counts = np.ones(())
        for dim, (length, size) in enumerate(zip(self.lengths, self.sizes, strict=True)):
            first = np.arange(self.outputs[dim]) * self.strides[dim] - self.padding[dim][0]
            inside = [(first + at >= 0) & (first + at < length) for at in range(size)]
            counts = np.multiply.outer(counts, np.sum(inside, axis=0))
        return counts[None, ..., None]


@on_windows("keras:nn", "depthwise_conv")
def depthwise(
    distribution: Distribution,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    kernel: tf.Tensor | keras.Variable,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> tf.Tensor:
    """Hook on `depthwise_conv`: a sum over the positions of the window, for a kernel [*sizes, channels, multiplier]."""
    inputs, kernel = tf.convert_to_tensor(inputs), whole_kernel(kernel)
    sizes = tuple(cast("list[int]", kernel.shape.as_list()))[:-2]
    window = _window(inputs, sizes, strides, dilation_rate or 1, padding, data_format)
    if window is None:
        return convolve(distribution, original, inputs, kernel, strides, padding, data_format, dilation_rate)
    # [rows, *outputs, channels, 1] times [channels, multiplier]: each channel by its own filters
    products = [tf.expand_dims(part, -1) * kernel[at] for at, part in window.positions(by_rows(inputs))]
    total = functools.reduce(tf.add, products)
    channels = math.prod(cast("list[int]", kernel.shape.as_list())[-2:])
    return by_rows(tf.reshape(total, [inputs.shape[0], *window.outputs, channels]))


@on_windows("keras:nn", "separable_conv")
def separable(
    _: object,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    depthwise_kernel: tf.Tensor | keras.Variable,
    pointwise_kernel: tf.Tensor | keras.Variable,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> tf.Tensor:
    """Hook on `separable_conv`: the two convolutions that it is, both of which have hooks of their own."""
    if standardize_data_format(data_format) != "channels_last":
        parts = (depthwise_kernel, pointwise_kernel, strides, padding, data_format, dilation_rate)
        return by_rows_only(original, inputs, *parts)
    # Keras's annotations say int; its code takes a number for each dim
    between = nn.depthwise_conv(inputs, depthwise_kernel, strides, padding, data_format, dilation_rate)  # type: ignore[arg-type]
    return nn.conv(between, pointwise_kernel, 1, "valid", data_format)


@on_windows("keras:nn", "average_pool")
def average_pool(
    _: object,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: str = "valid",
    data_format: str | None = None,
) -> tf.Tensor:
    """Hook on `average_pool`: a sum over the positions of the window; padding does not count."""
    inputs = tf.convert_to_tensor(inputs)
    # Keras: strides of a pool are its size where they are left out
    window = _window(inputs, pool_size, strides or pool_size, 1, padding, data_format)
    if window is None:
        return by_rows_only(original, inputs, pool_size, strides, padding, data_format)
    total = functools.reduce(tf.add, [part for _, part in window.positions(by_rows(inputs))])
    return by_rows(total / tf.constant(window.counts(), total.dtype))


@without_rule("tensorflow.nn", "pool")
def pool(
    _: object,
    original: Callable[..., tf.Tensor],
    input: tf.Tensor,
    window_shape: int | Sequence[int],
    pooling_type: str,
    strides: int | Sequence[int] | None = None,
    padding: str = "VALID",
    data_format: str | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.nn.pool`, which Keras's adaptive pools use: averages by `average_pool`, others between split rows."""

    def pooled(values: tf.Tensor, *options: object) -> tf.Tensor:
        return original(values, window_shape, pooling_type, strides, padding, data_format, dilations, name)

    if pooling_type == "AVG" and dilations is None and (data_format or "C").endswith("C"):
        return average_pool(_, pooled, input, window_shape, strides or 1, padding, "channels_last")
    return by_rows_only(pooled, input)


@without_rule("tensorflow.nn", "depthwise_conv2d")
def depthwise_conv2d(
    distribution: Distribution,
    original: Callable[..., tf.Tensor],
    input: tf.Tensor,
    filter: tf.Tensor,
    strides: Sequence[int],
    padding: str,
    data_format: str | None = None,
    dilations: Sequence[int] | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.nn.depthwise_conv2d`, with which Keras blurs images: as `depthwise`."""

    def convolved(values: tf.Tensor, kernel: tf.Tensor, *options: object) -> tf.Tensor:
        return original(values, kernel, strides, padding, data_format, dilations, name)

    filter = tf.convert_to_tensor(filter)
    # explicit paddings, channels first and dilations are rare here: TensorFlow's own does them, on gathered dims
    plain = isinstance(padding, str) and (data_format or "C").endswith("C") and dilations in (None, 1, [1, 1], (1, 1))
    if not plain or not filter.shape.is_fully_defined():
        return by_rows_only(original, input, filter, strides, padding, data_format, dilations, name)
    return depthwise(distribution, convolved, input, filter, strides[1:3], padding, "channels_last")


def _window(
    inputs: tf.Tensor,
    sizes: int | Sequence[int],
    strides: int | Sequence[int],
    rates: int | Sequence[int],
    padding: str,
    data_format: str | None,
) -> Window | None:
    """The window; None where it is large, or shapes are not known."""
    if standardize_data_format(data_format) != "channels_last" or not inputs.shape.is_fully_defined():
        return None
    lengths = tuple(cast("list[int]", inputs.shape.as_list()))[1:-1]

    def each(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * len(lengths) if isinstance(value, int) else tuple(value)

    window = Window(lengths, each(sizes), each(strides), each(rates), padding.lower() == "same")
    return window if window.is_small else None
