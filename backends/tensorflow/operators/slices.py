"""Slices along split dims: DTensor fails on some, computes others wrongly, and loses the layout of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import array_ops

from keras_flow.backends.tensorflow.operators.operations import known_value, on_operation, whole_dims
from keras_flow.errors import FlowError


@on_operation("tensorflow", "slice", "its gradient fails along a split dim")
def slice(
    _: object,
    original: Callable[..., object],
    input_: tf.Tensor | np.ndarray,
    begin: object,
    size: object,
    name: str | None = None,
) -> object:
    """Hook on `tf.slice`: input and result are whole along the cut dims."""
    input_ = tf.convert_to_tensor(input_)
    known = known_value(size)
    shape = input_.shape
    # -1 keeps a dim to its end; only dims of which something is cut away must be whole
    dims = [dim for dim in range(shape.rank) if known is None or known[dim] not in (-1, shape[dim])]
    return whole_dims(original(whole_dims(input_, dims), begin, size, name=name), dims)


@on_operation(
    "tensorflow.python.ops.array_ops",
    "strided_slice",
    "a negative stride (x[::-1]) gives wrong numbers, a new dim before a split one (x[None]) ends the "
    "process, an integer before a split one (x[2]) splits another",
)
def strided_slice(
    _: object,
    original: Callable[..., Any],
    input_: Any,
    begin: Any,
    end: Any,
    strides: Any = None,
    begin_mask: int = 0,
    end_mask: int = 0,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Hook on `strided_slice`: by operations that DTensor has rules for.

    `x[::-1]` is `tf.reverse`; of `x[None]` the new dims are added afterwards; `x[2]` is a part of length one, whose dim
    is removed afterwards.

    Raises:
        FlowError: a negative stride over a part of a dim.
    """
    if kwargs.get("new_axis_mask"):
        return _with_new_dims(input_, begin, end, strides, begin_mask, end_mask, **kwargs)
    if kwargs.get("shrink_axis_mask") and not kwargs.get("ellipsis_mask") and not args:
        taken = _without_dims(original, input_, begin, end, strides, begin_mask, end_mask, **kwargs)
        if taken is not None:
            return taken
    # strides that are computed in the step are positive wherever Keras makes them: nothing to go around
    steps = known_value(strides)
    if steps is None or all(step >= 0 for step in steps):
        return original(input_, begin, end, strides, begin_mask, end_mask, *args, **kwargs)
    masks = [kwargs.get("ellipsis_mask", 0), kwargs.get("new_axis_mask", 0), *args[:2]]
    # with both mask bits set neither bound holds, so the whole dim is meant, as in x[::-1]
    whole = [bool(begin_mask & end_mask & (1 << place)) for place in range(len(steps))]
    if any(masks) or any(step < 0 and (step != -1 or not whole[place]) for place, step in enumerate(steps)):
        raise FlowError(
            "a slice with a negative stride over a part of a dim, which TensorFlow's DTensor computes wrongly: use "
            "keras.ops.flip on the sliced tensor"
        )
    reversed_ = tf.reverse(input_, [place for place, step in enumerate(steps) if step < 0])
    return original(reversed_, begin, end, [abs(int(step)) for step in steps], begin_mask, end_mask, *args, **kwargs)


def _with_new_dims(
    input_: tf.Tensor,
    begin: Sequence[object],
    end: Sequence[object],
    strides: Sequence[object] | None,
    begin_mask: int,
    end_mask: int,
    *,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    **kwargs: object,
) -> tf.Tensor:
    """A slice with new dims as a slice without them, then `tf.expand_dims`.

    `strided_slice` describes each place of an index: a bit of a mask for each, and entries of begin, end and strides.
    """
    bounds = [_entries(value) for value in (begin, end, strides) if value is not None]
    count = len(bounds[0])
    # of a place that is both, TensorFlow takes the ellipsis
    is_new = [bool(new_axis_mask >> place & 1) and not ellipsis_mask >> place & 1 for place in range(count)]
    kept = [place for place in range(count) if not is_new[place]]

    def masked(mask: int) -> int:
        return sum(1 << index for index, place in enumerate(kept) if mask >> place & 1)

    if kept:
        bounds = [[values[place] for place in kept] for values in bounds]
        input_ = array_ops.strided_slice(
            input_,
            *bounds,
            begin_mask=masked(begin_mask),
            end_mask=masked(end_mask),
            ellipsis_mask=masked(ellipsis_mask),
            shrink_axis_mask=masked(shrink_axis_mask),
            **kwargs,
        )
    # places after an ellipsis count from the end
    ellipsis = next((place for place in range(count) if ellipsis_mask >> place & 1), count)
    made = [not shrink_axis_mask >> place & 1 or is_new[place] for place in range(count)]  # gives a dim of the result
    for place in range(ellipsis):
        if is_new[place]:
            input_ = tf.expand_dims(input_, sum(made[:place]))
    for place in reversed(range(ellipsis, count)):
        if is_new[place]:
            input_ = tf.expand_dims(input_, -1 - sum(made[place + 1 :]))
    return input_


def _without_dims(
    original: Callable[..., tf.Tensor],
    input_: tf.Tensor,
    begin: Any,
    end: Any,
    strides: Any,
    begin_mask: int,
    end_mask: int,
    *,
    shrink_axis_mask: int,
    **kwargs: Any,
) -> tf.Tensor | None:
    """A slice with integers as one of parts of length one, whose dims `tf.squeeze` takes out; None if not known.

    For `x[2]` of a tensor [time, rows, features] that is split by rows, DTensor splits the result by features.
    """
    first, steps = known_value(begin), known_value(strides)
    last = known_value(end)
    if first is None or last is None or (steps is not None and any(step < 0 for step in steps)):
        return None
    dims = [place for place in range(len(first)) if shrink_axis_mask >> place & 1]
    last, end_mask = np.array(last), end_mask & ~shrink_axis_mask
    for dim in dims:
        last[dim] = first[dim] + 1
        end_mask |= (first[dim] == -1) << dim  # up to the end: -1 + 1 would be the first entry
    part = original(input_, first, last, steps, begin_mask, int(end_mask), **kwargs)
    return tf.squeeze(part, dims)


def _entries(value: Any) -> Sequence[object]:
    """The entries of a vector, as numbers where they are known: DTensor partitions slices whose bounds it knows."""
    known = known_value(value)
    return tf.unstack(tf.convert_to_tensor(value)) if known is None else [int(entry) for entry in known]
