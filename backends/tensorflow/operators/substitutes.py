"""Operations that DTensor has no rule for, made of those that it splits: otherwise every rank would gather all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_flow.backends.tensorflow.operators.operations import known_value, on_operation, whole_dims, without_rule


@without_rule("tensorflow", "argmin", also=("tensorflow.math:argmin",))
def argmin(
    _: object,
    original: Callable[..., tf.Tensor],
    input: Any,
    axis: int | None = None,
    output_type: Any = tf.int64,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.argmin`: the largest of what is ordered the other way round; `~x` has no overflow as `-x` has."""
    input = tf.convert_to_tensor(input)
    if input.dtype.is_floating:
        return tf.argmax(-input, axis, output_type, name)
    if input.dtype.is_integer:
        return tf.argmax(tf.bitwise.invert(input), axis, output_type, name)
    return original(input, axis, output_type, name)


@without_rule("tensorflow", "reverse")
def reverse(
    _: object, original: Callable[..., tf.Tensor], tensor: Any, axis: Any, name: str | None = None, **kwargs: Any
) -> tf.Tensor:
    """Hook on `tf.reverse`: a lookup along each dim, which is whole; its gradient is the same."""
    tensor, dims = tf.convert_to_tensor(tensor), known_value(axis)
    if dims is None or not tensor.shape.rank:
        return original(tensor, axis, name)
    for dim in np.ravel(dims):
        tensor = _reversed(original, tensor, int(dim) % cast(int, tensor.shape.rank))
    return tensor


def _reversed(original: Callable[..., tf.Tensor], tensor: tf.Tensor, dim: int) -> tf.Tensor:
    length = tensor.shape[dim]
    # DTensor has no rule for ReverseV2, but a lookup of constant places it partitions; these need the length
    if length is None:
        return original(tensor, [dim])

    def looked_up(values: tf.Tensor) -> tf.Tensor:
        backwards = tf.constant(np.arange(length)[::-1].copy(), tf.int32)
        return cast("tf.Tensor", whole_dims(tf.gather(whole_dims(values, (dim,)), backwards, axis=dim), (dim,)))

    @tf.custom_gradient
    def reversed_(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return looked_up(values), looked_up

    return cast("tf.Tensor", reversed_(tensor))


@without_rule("tensorflow", "roll")
def roll(
    _: object, original: Callable[..., tf.Tensor], input: Any, shift: Any, axis: Any, name: str | None = None
) -> tf.Tensor:
    """Hook on `tf.roll`: the end of each dim, then its beginning."""
    input, shifts, dims = tf.convert_to_tensor(input), known_value(shift), known_value(axis)
    if shifts is None or dims is None or not input.shape.is_fully_defined():
        return original(input, shift, axis, name)
    for places, dim in np.broadcast(shifts, dims):
        length = input.shape[int(dim)]
        cut = -int(places) % length if length else 0
        if cut:
            input = tf.concat(tf.split(input, [cut, length - cut], int(dim))[::-1], int(dim))
    return tf.identity(input, name)


@without_rule("tensorflow", "repeat")
def repeat(
    _: object,
    original: Callable[..., tf.Tensor],
    input: Any,
    repeats: Any,
    axis: int | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.repeat`: the gradient adds up the copies of an entry along a dim of their own.

    TensorFlow's own takes twice as many dims as the tensor, and DTensor cannot cut a tensor of more than 8.
    """
    input = tf.convert_to_tensor(input)
    length = None if axis is None else input.shape[axis]
    if axis is None or length is None or not isinstance(repeats, int) or not input.dtype.is_floating:
        return original(input, repeats, axis, name)
    dim = axis % cast(int, input.shape.rank)

    @tf.custom_gradient
    def repeated(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            whole = cast("tf.Tensor", whole_dims(upstream, (dim,)))
            shape = tf.shape(whole)
            copies = tf.reshape(whole, tf.concat([shape[:dim], [length, repeats], shape[dim + 1 :]], 0))
            return tf.reduce_sum(copies, dim + 1)

        return original(whole_dims(values, (dim,)), repeats, dim, name), gradient

    return cast("tf.Tensor", repeated(input))


@without_rule("tensorflow.math", "cumprod")
def cumprod(
    _: object,
    original: Callable[..., tf.Tensor],
    x: Any,
    axis: int = 0,
    exclusive: bool = False,
    reverse: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.math.cumprod`: doubling (Hillis and Steele, 1986).

    Each step multiplies by the element 1, 2, 4 ... places before.

    Example:
        `[a, b, c, d] -> [a, ab, bc, cd] -> [a, ab, abc, abcd]`.
    """
    x = tf.convert_to_tensor(x)
    length = x.shape[axis] if x.shape.rank else None
    # Keras asks for neither of the first two; the number of steps needs a length
    if exclusive or reverse or length is None:
        return original(x, axis, exclusive, reverse, name)
    x, distance = cast("tf.Tensor", whole_dims(x, (axis,))), 1
    while distance < length:
        # a split and a pad, because DTensor partitions slices along other dims wrongly
        first, _ = tf.split(x, [length - distance, distance], axis)
        pads: Sequence = [(distance, 0) if dim == axis % x.shape.rank else (0, 0) for dim in range(x.shape.rank)]
        x = x * tf.pad(first, pads, constant_values=1)
        distance *= 2
    return x


@without_rule("tensorflow", "reduce_prod", also=("tensorflow.math:reduce_prod",))
def reduce_prod(
    _: object,
    original: Callable[..., tf.Tensor],
    input_tensor: Any,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.reduce_prod`: products of halves, whose gradient has rules; that of TensorFlow needs `Cumprod`.

    Example:
        `[a, b, c, d] -> [ac, bd] -> [acbd]`.
    """
    x = tf.convert_to_tensor(input_tensor)
    if x.shape.rank is None:
        return original(input_tensor, axis, keepdims, name)
    given = range(x.shape.rank) if axis is None else (axis if isinstance(axis, Sequence) else (axis,))
    axes = [dim % x.shape.rank for dim in given]
    lengths = [x.shape[dim] or 0 for dim in axes]
    if 0 in lengths:  # none, or not known
        return original(input_tensor, axis, keepdims, name)
    x = cast("tf.Tensor", whole_dims(x, tuple(axes)))
    for dim, length in zip(axes, lengths, strict=True):
        while length > 1:
            half, odd = divmod(length, 2)
            first, second, *rest = tf.split(x, [half, half, *[1] * odd], dim)
            x, length = tf.concat([first * second, *rest], dim), half + odd
    return x if keepdims else tf.reduce_sum(x, axes)  # dims of length 1


@without_rule("tensorflow.math", "bessel_i0")
def bessel_i0(_: object, original: Callable[..., tf.Tensor], x: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.math.bessel_i0`: its scaled form, whose gradient has a rule."""
    x = tf.convert_to_tensor(x)
    return tf.exp(tf.abs(x)) * tf.math.bessel_i0e(x)


@without_rule("tensorflow.math", "softplus", also=("tensorflow.nn:softplus",))
def softplus(_: object, original: Callable[..., tf.Tensor], features: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.math.softplus`: with a gradient by the sigmoid."""

    @tf.custom_gradient
    def smooth(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return original(values, name=name), lambda upstream: upstream * tf.sigmoid(values)

    return cast("tf.Tensor", smooth(tf.convert_to_tensor(features)))


@without_rule("tensorflow.nn", "softsign", also=("tensorflow.math:softsign",))
def softsign(_: object, original: Callable[..., tf.Tensor], features: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.nn.softsign`: its formula."""
    features = tf.convert_to_tensor(features)
    return features / (1 + tf.abs(features))


@without_rule("tensorflow.python.ops.array_ops_stack", "unstack", also=("tensorflow:unstack",))
def unstack(
    _: object,
    original: Callable[..., list[tf.Tensor]],
    value: Any,
    num: int | None = None,
    axis: int = 0,
    name: str = "unstack",
) -> list[tf.Tensor]:
    """Hook on `tf.unstack`, which is also the gradient of `tf.stack`: parts of length one.

    DTensor errs on split ones.
    """
    value = tf.convert_to_tensor(value)
    rank = value.shape.rank
    count = value.shape[axis] if rank else None
    if count is None or not axis % cast(int, rank):
        return original(value, num, axis, name)
    return [tf.squeeze(part, [axis]) for part in tf.split(value, count, axis)]


@without_rule("tensorflow.linalg", "cross")
def cross(_: object, original: Callable[..., tf.Tensor], a: Any, b: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.linalg.cross`: its formula."""
    a, b = (tf.unstack(tf.convert_to_tensor(value), axis=-1) for value in (a, b))
    return tf.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]], -1)


@without_rule("tensorflow", "ensure_shape")
def ensure_shape(
    _: object, original: Callable[..., tf.Tensor], x: Any, shape: Any, name: str | None = None
) -> tf.Tensor:
    """Hook on `tf.ensure_shape`: the tensor itself where its shape is known as the step is traced."""
    x = tf.convert_to_tensor(x)
    if x.shape.is_fully_defined() and x.shape.is_compatible_with(shape):
        return tf.identity(x, name)
    return original(x, shape, name)


@on_operation("tensorflow", "pad", "fails along a split dim, and has no rule for mirrors")
def pad(
    _: object,
    original: Callable[..., tf.Tensor],
    tensor: Any,
    paddings: Any,
    mode: str = "CONSTANT",
    constant_values: Any = 0,
    name: str | None = None,
) -> object:
    """Hook on `tf.pad`: the padded dims are whole; mirrored values are reversed parts beside the tensor."""
    tensor, known = tf.convert_to_tensor(tensor), known_value(paddings)
    edge = int(mode.upper() == "REFLECT")  # whether the outermost entries are left out
    mirrors = mode.upper() != "CONSTANT" and known is not None and tensor.shape.is_fully_defined()
    # TensorFlow raises where there are fewer entries than are to be mirrored
    if known is None or not mirrors or np.any(np.max(known, 1, initial=0) > np.subtract(tensor.shape, edge)):
        dims = range(cast(int, tensor.shape.rank)) if known is None else np.flatnonzero(np.any(known, 1)).tolist()
        return whole_dims(original(whole_dims(tensor, dims), paddings, mode, constant_values, name), dims)
    for dim, (before, after) in enumerate(known.tolist()):
        length = cast(int, tensor.shape[dim])
        sizes = [edge, before, length - edge - before], [length - edge - after, after, edge]
        first, last = (tf.reverse(tf.split(tensor, size, dim)[1], [dim]) for size in sizes)
        tensor = tf.concat([*[first] * bool(before), tensor, *[last] * bool(after)], dim) if before or after else tensor
    return tensor


@on_operation("keras:core", "dynamic_update_slice", "an operation of XLA, which has no rule")
def update_slice(
    _: object,
    original: Callable[..., tf.Tensor],
    inputs: Any,
    updates: Any,
    start_indices: Any,
    *args: Any,
    **kwargs: Any,
) -> tf.Tensor:
    """Hook on `dynamic_update_slice`: XLA's operation at places that are known, which it keeps inside of the tensor."""
    inputs, updates, first = tf.convert_to_tensor(inputs), tf.convert_to_tensor(updates), known_value(start_indices)
    if first is None or not (inputs.shape.is_fully_defined() and updates.shape.is_fully_defined()):
        return original(inputs, updates, start_indices, *args, **kwargs)
    room = np.subtract(inputs.shape, updates.shape)
    first = np.clip(first, 0, room)
    paddings = np.stack([first, room - first], -1)
    inside = np.pad(np.ones(updates.shape, bool), paddings)
    return tf.where(inside, tf.pad(tf.cast(updates, inputs.dtype), paddings), inputs)
