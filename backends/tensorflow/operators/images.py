"""Operations on images that DTensor has no rule for, made of those that it splits by rows."""

# pyright: reportArgumentType=false
# (the stubs of tf.Tensor know no ellipsis and no None in a slice)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import smart_cond
from tensorflow.python.ops import image_grad, image_ops

from keras_flow.backends.tensorflow.convolutions import by_rows_only
from keras_flow.backends.tensorflow.operators.operations import by_rows, without_rule
from keras_flow.backends.tensorflow.operators.windows import Window


@without_rule("tensorflow.image", "hsv_to_rgb")
def hsv_to_rgb(_: object, original: Callable[..., tf.Tensor], images: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.image.hsv_to_rgb`: the formula of its kernel; TensorFlow has no gradient of it."""
    # no gradient: TensorFlow's kernel has none, and Keras's numbers on one device have none either
    hue, saturation, value = tf.unstack(tf.stop_gradient(tf.convert_to_tensor(images)), axis=-1)
    # hue is a part of the colour circle, whose six sectors have formulas of their own
    hue = hue * 6
    parts = tf.abs(hue - 3) - 1, 2 - tf.abs(hue - 2), 2 - tf.abs(hue - 4)
    zero, one = tf.zeros((), hue.dtype), tf.ones((), hue.dtype)
    bounded = [tf.minimum(tf.maximum(part, zero), one) for part in parts]
    return tf.stack([((one - saturation) + saturation * part) * value for part in bounded], -1)


@without_rule("tensorflow.image", "rgb_to_hsv")
def rgb_to_hsv(_: object, original: Callable[..., tf.Tensor], images: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.image.rgb_to_hsv`: the formula of its kernel; the gradient is that of TensorFlow."""

    @tf.custom_gradient
    def converted(images: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        red, green, blue = tf.unstack(images, axis=-1)
        value = tf.maximum(tf.maximum(red, green), blue)
        span = value - tf.minimum(tf.minimum(red, green), blue)
        # a grey pixel has no span and no hue; it is set to 0 below
        part = tf.math.divide_no_nan(tf.ones((), span.dtype), 6 * span)
        third = tf.constant(1 / 3, span.dtype)
        hue = tf.where(
            tf.equal(red, value),
            part * (green - blue),
            tf.where(tf.equal(green, value), part * (blue - red) + third, part * (red - green) + 2 * third),
        )
        hue = tf.where(hue < 0, hue + 1, hue)
        saturation = tf.where(value > 0, tf.math.divide_no_nan(span, value), tf.zeros_like(span))
        result = tf.stack([tf.where(span > 0, hue, tf.zeros_like(hue)), saturation, value], -1)
        operation = SimpleNamespace(inputs=[images], outputs=[result])
        return result, lambda upstream: image_grad._RGBToHSVGrad(operation, upstream)  # private, TensorFlow 2.21

    return cast("tf.Tensor", converted(tf.convert_to_tensor(images)))


@without_rule("tensorflow.image", "resize")
def resize(_: object, original: Callable[..., tf.Tensor], images: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Hook on `tf.image.resize`: input and output are split by rows only."""
    images = tf.convert_to_tensor(images)
    # one image has no rows
    if images.shape.rank != 4:
        return original(images, *args, **kwargs)
    return by_rows_only(original, images, *args, **kwargs)


@without_rule("tensorflow.nn", "depth_to_space")
def depth_to_space(
    _: object,
    original: Callable[..., tf.Tensor],
    input: Any,
    block_size: int,
    data_format: str = "NHWC",
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.nn.depth_to_space`: a reshape and a transpose."""

    def shapes(height: int, width: int, channels: int) -> tuple[Sequence[int], Sequence[int]]:
        left = channels // block_size**2
        return (height, width, block_size, block_size, left), (height * block_size, width * block_size, left)

    return _blocks_transposed(original, input, block_size, data_format, name, shapes)


@without_rule("tensorflow.nn", "space_to_depth")
def space_to_depth(
    _: object,
    original: Callable[..., tf.Tensor],
    input: Any,
    block_size: int,
    data_format: str = "NHWC",
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.nn.space_to_depth`: a reshape and a transpose."""

    def shapes(height: int, width: int, channels: int) -> tuple[Sequence[int], Sequence[int]]:
        high, wide = height // block_size, width // block_size
        return (high, block_size, wide, block_size, channels), (high, wide, channels * block_size**2)

    return _blocks_transposed(original, input, block_size, data_format, name, shapes)


def _blocks_transposed(
    original: Callable[..., tf.Tensor],
    input: Any,
    block_size: int,
    data_format: str,
    name: str | None,
    shapes: Callable[[int, int, int], tuple[Sequence[int], Sequence[int]]],
) -> tf.Tensor:
    """An image [rows, height, width, channels] in blocks, the third and second of whose dims change places.

    `shapes`: height, width and channels -> the dims of the blocks, and those of the result, without the rows.
    """
    input = tf.convert_to_tensor(input)
    if data_format != "NHWC" or not input.shape.is_fully_defined():
        return original(input, block_size, data_format, name)
    rows, *dims = cast("list[int]", input.shape.as_list())
    between, after = shapes(*dims)
    blocks = tf.transpose(tf.reshape(by_rows(input), [rows, *between]), [0, 1, 3, 2, 4, 5])
    return by_rows(tf.reshape(blocks, [rows, *after]))


@without_rule("tensorflow.image", "extract_patches")
def extract_patches(
    _: object,
    original: Callable[..., tf.Tensor],
    images: Any,
    sizes: Sequence[int],
    strides: Sequence[int],
    rates: Sequence[int],
    padding: str,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.image.extract_patches`: the patch under each position of the window, in order."""
    images = tf.convert_to_tensor(images)
    shape = images.shape.as_list() if images.shape.rank == 4 else [None]
    if None in shape:
        return original(images, sizes, strides, rates, padding, name)
    dims = [tuple(int(each) for each in value[1:3]) for value in (shape, sizes, strides, rates)]
    window = Window(*cast(Any, dims), is_same=padding.upper() == "SAME")
    if not window.is_small:
        return original(images, sizes, strides, rates, padding, name)
    return tf.concat([part for _, part in window.positions(by_rows(images))], -1)


# ---- projective transforms: rotations, shifts, zooms


@without_rule(
    "tensorflow.python.ops.gen_image_ops",
    "image_projective_transform_v3",
    also=("tensorflow.raw_ops:ImageProjectiveTransformV3",),
)
def projective_transform(
    _: object,
    original: Callable[..., tf.Tensor],
    images: Any,
    transforms: Any,
    output_shape: Any,
    fill_value: Any,
    interpolation: str,
    fill_mode: str = "CONSTANT",
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `ImageProjectiveTransformV3`: the formula of its kernel, with a lookup within each image.

    The gradient is TensorFlow's: the upstream one transformed by the inverse matrices.
    """
    images, transforms = tf.convert_to_tensor(images), tf.convert_to_tensor(transforms)
    size = smart_cond.smart_constant_value(tf.convert_to_tensor(output_shape))  # of `tf.shape(images)[1:3]`, too
    if size is None or not images.dtype.is_floating or not images.shape.is_fully_defined():
        return original(
            images=images,
            transforms=transforms,
            output_shape=output_shape,
            fill_value=fill_value,
            interpolation=interpolation,
            fill_mode=fill_mode,
        )
    height, width = (int(length) for length in images.shape[1:3])

    @tf.custom_gradient
    def transformed(images: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        result = _sampled(images, transforms, size, fill_value, interpolation, fill_mode)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            matrices = tf.linalg.inv(image_ops.flat_transforms_to_matrices(transforms))
            inverse = image_ops.matrices_to_flat_transforms(matrices)
            return projective_transform(_, original, upstream, inverse, (height, width), 0.0, interpolation, fill_mode)

        return result, gradient

    return cast("tf.Tensor", transformed(by_rows(images)))


def _sampled(
    images: tf.Tensor, transforms: tf.Tensor, size: np.ndarray, fill_value: Any, interpolation: str, fill_mode: str
) -> tf.Tensor:
    """The images at the places that the transforms [rows or 1, 8] give for each place of the result."""
    rows, height, width, channels = cast("list[int]", images.shape.as_list())
    down, right = (part.ravel().astype("float32") for part in np.meshgrid(*map(np.arange, size), indexing="ij"))
    # a transform is [a0, a1, a2, b0, b1, b2, c0, c1]; the place (x, y) of the result is read at ((a0 x + a1 y + a2) /
    # k, (b0 x + b1 y + b2) / k), k = c0 x + c1 y + 1
    first = [transforms[:, place, None] for place in range(8)]
    scale = first[6] * right + first[7] * down + 1.0
    x = _mapped((first[0] * right + first[1] * down + first[2]) / scale, width, fill_mode)
    y = _mapped((first[3] * right + first[4] * down + first[5]) / scale, height, fill_mode)
    # one dim of pixels: a gather with `batch_dims=1` stays within its row, which DTensor splits
    pixels = tf.reshape(images, [rows, height * width, channels])
    filling = tf.cast(fill_value, images.dtype)

    def read(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        place = tf.cast(_bounded(y, height), tf.int32) * width + tf.cast(_bounded(x, width), tf.int32)
        values = tf.gather(pixels, tf.broadcast_to(place, [rows, math.prod(size)]), batch_dims=1)
        return tf.where(inside[..., None], values, filling)

    def part(value: tf.Tensor) -> tf.Tensor:
        return tf.cast(value, images.dtype)[..., None]

    if interpolation == "NEAREST":
        # halves are rounded away from zero; tf.round takes the even number
        values = read(*(tf.sign(c) * tf.floor(tf.abs(c) + 0.5) for c in (y, x)))
    else:
        up, left = tf.floor(y), tf.floor(x)
        # bilinear: the four neighbours, weighed by how near they are
        above = part(left + 1 - x) * read(up, left) + part(x - left) * read(up, left + 1)
        below = part(left + 1 - x) * read(up + 1, left) + part(x - left) * read(up + 1, left + 1)
        values = part(up + 1 - y) * above + part(y - up) * below
    values = tf.where(tf.equal(scale, 0)[..., None], filling, values)
    return by_rows(tf.reshape(values, [rows, *(int(length) for length in size), channels]))


def _bounded(coordinate: tf.Tensor, length: int) -> tf.Tensor:
    return tf.clip_by_value(coordinate, 0.0, length - 1.0)


def _mapped(coordinate: tf.Tensor, length: int, fill_mode: str) -> tf.Tensor:
    """Return where a coordinate beyond the image is read, as TensorFlow's `MapCoordinate` does."""
    if fill_mode == "CONSTANT":
        return coordinate
    if fill_mode == "NEAREST" or length <= 1:
        return _bounded(coordinate, length)
    if fill_mode == "REFLECT":
        # an image mirrored at its edge repeats after twice its length
        twice = 2.0 * length
        below = twice * _truncated(-coordinate / twice) + coordinate
        below = tf.where(below < -length, below + twice, -below - 1)
        above = coordinate - twice * _truncated(coordinate / twice)
        above = tf.where(above >= length, twice - above - 1, above)
    else:
        # wrapped around; the division by length - 1 is TensorFlow's own, and its results are to be equal
        below = coordinate + length * (_truncated(-coordinate / (length - 1)) + 1)
        above = coordinate - length * _truncated(coordinate / (length - 1))
    outside = tf.where(coordinate < 0, below, tf.where(coordinate > length - 1, above, coordinate))
    return _bounded(outside, length)


def _truncated(value: tf.Tensor) -> tf.Tensor:
    return tf.sign(value) * tf.floor(tf.abs(value))
