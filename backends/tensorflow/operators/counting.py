"""Lookups, counts and segments, made of comparisons that DTensor splits by rows: it has no rules for the operations."""

# pyright: reportArgumentType=false
# (the stubs of tf.Tensor know no ellipsis and no None in a slice)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_flow.backends.tensorflow.operators.operations import known_value, whole_dims, without_rule

#: comparisons with more values than these cost more than the rows that each rank would gather
_MOST_COMPARED = 256


@without_rule("tensorflow.python.ops.array_ops", "one_hot", also=("tensorflow:one_hot",))
def one_hot(
    _: object,
    original: Callable[..., tf.Tensor],
    indices: Any,
    depth: Any,
    on_value: Any = None,
    off_value: Any = None,
    axis: int | None = None,
    dtype: Any = None,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.one_hot`: along the last dim, a comparison with all classes."""
    indices, count = tf.convert_to_tensor(indices), known_value(depth)
    is_last = axis in (None, -1) or axis == indices.shape.rank
    if count is None or not is_last or on_value is not None or off_value is not None:
        return original(indices, depth, on_value, off_value, axis, dtype, name)
    chosen = tf.equal(tf.cast(tf.expand_dims(indices, -1), tf.int64), tf.range(int(count), dtype=tf.int64))
    return tf.cast(chosen, dtype or tf.float32)


@without_rule("tensorflow", "searchsorted")
def searchsorted(
    _: object,
    original: Callable[..., tf.Tensor],
    sorted_sequence: Any,
    values: Any,
    side: str = "left",
    out_type: Any = tf.int32,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.searchsorted`: for a short sequence, the number of its entries below the value."""
    sequence = tf.convert_to_tensor(sorted_sequence)
    values = tf.convert_to_tensor(values, dtype=sequence.dtype)
    length = sequence.shape[-1] if sequence.shape.rank else None
    if length is None or length > _MOST_COMPARED:
        return original(sequence, values, side=side, out_type=out_type, name=name)
    sequence, values = cast("tf.Tensor", whole_dims(sequence, (-1,)))[..., None, :], tf.expand_dims(values, -1)
    # a search puts nan after all entries, or before all
    comes_before = sequence < values if side == "left" else tf.logical_not(values < sequence)
    return tf.reduce_sum(tf.cast(comes_before, out_type), -1)


@without_rule("keras:numpy", "histogram")
def histogram(
    _: object, original: Callable[..., Any], x: Any, bins: Any = 10, range: Any = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Hook on `keras.ops.histogram`: how many values each bin has, where Keras selects, which gives no shape."""
    x = tf.convert_to_tensor(x)
    if not isinstance(bins, int) or bins > _MOST_COMPARED or not x.dtype.is_floating:
        return original(x, bins, range)
    least, most = (tf.reduce_min(x), tf.reduce_max(x)) if range is None else range
    edges = tf.cast(tf.linspace(least, most, bins + 1), x.dtype)
    values = tf.reshape(x, [-1])
    places = tf.searchsorted(edges[1:-1], values, side="right")
    # values beyond the range count in no bin, and those at its upper end in the last
    inside = (values >= tf.cast(least, x.dtype)) & (values <= tf.cast(most, x.dtype))
    chosen = tf.equal(places[:, None], np.arange(bins, dtype="int32")) & inside[:, None]
    return tf.reduce_sum(tf.cast(chosen, x.dtype), 0), edges


@without_rule("keras:numpy", "nanquantile")
def nanquantile(
    _: object,
    original: Callable[..., tf.Tensor],
    x: Any,
    q: Any,
    axis: int | Sequence[int] | None = None,
    method: str = "linear",
    keepdims: bool = False,
) -> tf.Tensor:
    """Hook on `keras.ops.nanquantile`: for one quantile, sort nan last.

    Keras selects the other elements, which gives no shape.
    """
    x, q = tf.convert_to_tensor(x), tf.convert_to_tensor(q)
    if method != "linear" or q.shape.rank != 0 or not x.shape.is_fully_defined() or not x.dtype.is_floating:
        return original(x, q, axis, method, keepdims)
    rank = cast(int, x.shape.rank)
    given = range(rank) if axis is None else (axis if isinstance(axis, Sequence) else (axis,))
    dims = [axis % rank for axis in given]
    kept = [dim for dim in range(rank) if dim not in dims]
    values = tf.reshape(tf.transpose(x, [*kept, *dims]), [*(x.shape[dim] for dim in kept), -1])
    known = tf.logical_not(tf.math.is_nan(values))
    ordered = tf.sort(tf.where(known, values, tf.constant(float("inf"), x.dtype)))
    places = tf.range(values.shape[-1])
    last = tf.reduce_sum(tf.cast(known, tf.int32), -1) - 1

    def at(place: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.where(tf.equal(places, place[..., None]), ordered, tf.zeros((), x.dtype)), -1)

    # as in Keras's `quantile`, in float64
    exact = tf.cast(last, tf.float64) * tf.cast(q, tf.float64)
    lower = tf.maximum(tf.cast(tf.math.ceil(exact), tf.int32) - 1, 0)
    upper = tf.minimum(lower + 1, last)
    share = tf.cast(tf.cast(upper, tf.float64) - exact, x.dtype)
    result = tf.where(last < 0, tf.constant(float("nan"), x.dtype), at(upper) * (1 - share) + at(lower) * share)
    return tf.reshape(result, [1 if dim in dims else x.shape[dim] for dim in range(rank)]) if keepdims else result


@without_rule("tensorflow.python.ops.math_ops", "unsorted_segment_max", also=("tensorflow.math:unsorted_segment_max",))
def segment_max(
    _: object,
    original: Callable[..., tf.Tensor],
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.math.unsorted_segment_max`: the largest of each segment, least where it has no rows."""
    return _by_segment(original, data, segment_ids, num_segments, name, _largest)


@without_rule("tensorflow.python.ops.math_ops", "unsorted_segment_min", also=("tensorflow.math:unsorted_segment_min",))
def segment_min(
    _: object,
    original: Callable[..., tf.Tensor],
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.math.unsorted_segment_min`: the smallest by comparison.

    A segment without rows has the largest number.
    """
    return _by_segment(original, data, segment_ids, num_segments, name, _smallest)


@without_rule(
    "tensorflow.python.ops.math_ops", "unsorted_segment_prod", also=("tensorflow.math:unsorted_segment_prod",)
)
def segment_prod(
    _: object,
    original: Callable[..., tf.Tensor],
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.math.unsorted_segment_prod`: the product by comparison; a segment without rows has 1."""
    return _by_segment(original, data, segment_ids, num_segments, name, _product)


def _by_segment(
    original: Callable[..., tf.Tensor],
    data: Any,
    segment_ids: Any,
    num_segments: Any,
    name: str | None,
    reduce: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """`reduce(data, of_segment)` where the segments are few and known, otherwise TensorFlow's own operation."""
    data = tf.convert_to_tensor(data)
    of_segment = _of_segments(data, segment_ids, num_segments)
    if of_segment is None:
        return original(data, segment_ids, num_segments, name)
    return reduce(data, of_segment)


def _largest(data: tf.Tensor, of_segment: tf.Tensor) -> tf.Tensor:
    return _extreme(tf.reduce_max, data, of_segment, data.dtype.min)


def _smallest(data: tf.Tensor, of_segment: tf.Tensor) -> tf.Tensor:
    return _extreme(tf.reduce_min, data, of_segment, data.dtype.max)


def _extreme(reduce: Callable[..., tf.Tensor], data: tf.Tensor, of_segment: tf.Tensor, of_none: float) -> tf.Tensor:
    """The largest or smallest of each segment's rows; rows that are equally large share the gradient."""

    @tf.custom_gradient
    def reduced(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        result = reduce(tf.where(of_segment, values[:, None], tf.constant(of_none, values.dtype)), 0)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # ties share the gradient, as the gradient of `reduce_max` has it
            chosen = of_segment & tf.equal(values[:, None], result)
            share = upstream / tf.reduce_sum(tf.cast(chosen, values.dtype), 0)
            return tf.reduce_sum(tf.where(chosen, share, tf.zeros((), values.dtype)), 1)

        return result, gradient

    return cast("tf.Tensor", reduced(data))


def _product(data: tf.Tensor, of_segment: tf.Tensor) -> tf.Tensor:
    """The product of each segment's rows; the gradient is the product of the others, of which some may be zero."""
    # rows of other segments count as factors of 1
    unit = tf.ones((), data.dtype)

    def product(values: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Prod(input=tf.where(of_segment, values[:, None], unit), axis=0)

    @tf.custom_gradient
    def multiplied(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        result, is_zero = product(values), tf.equal(values, 0)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # a product with one zero has a gradient at that zero only; with two, none at all
            zeros = tf.reduce_sum(tf.cast(of_segment & is_zero[:, None], values.dtype), 0)
            without = product(tf.where(is_zero, unit, values))
            others = tf.where(
                is_zero[:, None],
                tf.where(zeros > 1, tf.zeros((), values.dtype), without),
                # dividing by a zero is avoided here, because `where` would keep the NaN of the gradient's other branch
                result / tf.where(is_zero, unit, values)[:, None],
            )
            return tf.reduce_sum(tf.where(of_segment, upstream * others, tf.zeros((), values.dtype)), 1)

        return result, gradient

    return cast("tf.Tensor", multiplied(data))


def _of_segments(data: tf.Tensor, segment_ids: Any, num_segments: Any) -> tf.Tensor | None:
    """Whether a row is of a segment, [rows, segments, 1 ...]; None where these are many, or ids are of no rows."""
    ids, count = tf.convert_to_tensor(segment_ids), known_value(num_segments)
    if count is None or count > _MOST_COMPARED or ids.shape.rank != 1 or data.shape.rank is None:
        return None
    if not data.dtype.is_floating:
        return None
    chosen = tf.equal(ids[:, None], tf.range(int(count), dtype=ids.dtype))
    return (
        tf.reshape(chosen, [*chosen.shape, *[1] * (data.shape.rank - 1)]) if chosen.shape.is_fully_defined() else None
    )
