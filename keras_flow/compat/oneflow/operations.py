"""`flow.nn`, `flow.math`, and the operations that OneFlow has at its top; what they compute is `keras.ops`."""

from __future__ import annotations

import functools
import math as numbers
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_flow.compat.oneflow import tracing
from keras_flow.compat.oneflow.blobs import Blob, Reduced, apply, operation, value_of
from keras_flow.compat.oneflow.missing import Names, listed
from keras_flow.errors import FlowError

ops: Any = keras.ops  # of which Keras's annotations say that results may be None

Axes = int | Sequence[int] | None


# ---- shapes


def reshape(x: Blob, shape: Sequence[int], name: str | None = None) -> Blob:
    """The values in another shape; one that begins with the rows keeps them apart."""
    size, shape = numbers.prod(value_of(x, "reshape").shape), [int(each) for each in shape]
    if shape.count(-1) == 1:
        shape[shape.index(-1)] = size // max(1, -numbers.prod(shape))
    if any(each < 0 for each in shape) or numbers.prod(shape) != size:
        raise FlowError(f"flow.reshape: {x.shape} does not fit the shape {tuple(shape)}")
    if x.rows is not None and shape and shape[0] == x.shape[0]:
        return apply(keras.layers.Reshape(shape[1:]), x)
    if x.rows is not None and tracing.current("flow.reshape").is_mirrored:
        raise FlowError(
            f"flow.reshape: in the mirrored view the rows stay first: {(x.shape[0], -1)}, not {tuple(shape)}"
        )
    return apply(lambda tensor: ops.reshape(tensor, shape), x, rows=None)


def flatten(input: Blob, start_dim: int = 0, end_dim: int = -1, name: str | None = None) -> Blob:
    """The dims from one to another as one."""
    shape = value_of(input, "flatten").shape
    end = end_dim % len(shape) + 1
    return reshape(input, [*shape[:start_dim], numbers.prod(shape[start_dim:end]), *shape[end:]])


def matmul(a: Blob, b: Blob, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None) -> Blob:
    """The product of matrices, which are the last two dims."""
    swapped = functools.partial(ops.swapaxes, axis1=-1, axis2=-2)
    keeps = value_of(a, "matmul").rows is not None and not (transpose_a and len(a.shape) == 2)
    return apply(
        lambda x, y: ops.matmul(swapped(x) if transpose_a else x, swapped(y) if transpose_b else y),
        *(a, b),
        rows=a.rows if keeps else None,
    )


@listed("transpose", "a perm !conjugate !batch_axis_non_change")
def transpose(a: Blob, perm: Sequence[int] | None = None) -> Blob:
    """The dims in another order."""
    perm = range(len(a.shape))[::-1] if perm is None else perm
    return apply(lambda x: ops.transpose(x, tuple(perm)), a, rows=a.rows if perm[0] == 0 else None)


@listed("concat", "inputs axis !max_dim_size")
def concat(inputs: Sequence[Blob], axis: int = 0) -> Blob:
    """Values joined along a dim, which is not that of the rows."""
    if axis % len(inputs[0].shape) == 0 and inputs[0].rows is not None:
        raise FlowError("flow.concat joins along a dim that is not that of the rows; join arrays before the job")
    return apply(lambda *tensors: ops.concatenate(tensors, axis=axis), *inputs)


def unpack(input: Blob, unpack_num: int, name: str | None = None) -> Blob:
    """Cut the rows in so many micro-batches, in a job with stages; results are those of the whole batch.

    Raises:
        FlowError: the rows do not divide, or are cut already.
    """
    blob, trace = value_of(input, "unpack"), tracing.current("flow.unpack")
    if blob.rows is None or blob.pieces != 1 or blob.rows % unpack_num:
        raise FlowError(f"flow.unpack: {blob.shape} cannot be cut in {unpack_num} micro-batches of as many rows")
    if trace.need.kind == "stages":
        trace.require(microbatches=unpack_num)
    return Blob(blob.tensor, blob.rows, unpack_num)


def pack(input: Blob, pack_num: int, name: str | None = None) -> Blob:
    """Join what `unpack` has cut.

    Raises:
        FlowError: it was cut in another number.
    """
    if value_of(input, "pack").pieces != pack_num:
        raise FlowError(f"flow.pack: the value is cut in {input.pieces} micro-batches, not {pack_num}")
    return Blob(input.tensor, input.rows)


def watch(blob_watched: Blob, handler: Callable[[Any], object]) -> None:
    """Call a function with a value each time that the job has run: an array, in the mirrored view a list."""
    tracing.current("flow.watch").watched.append((value_of(blob_watched, "watch"), handler))


# ---- flow.math


def _reduction(kind: str) -> Callable[..., Blob]:
    def reduced(input_tensor: Blob, axis: Axes = None, keepdims: bool = False, name: str | None = None) -> Blob:
        x, function = value_of(input_tensor, f"math.reduce_{kind}"), getattr(ops, kind)
        count = len(x.shape)
        given = range(count) if axis is None else (axis,) if isinstance(axis, int) else axis
        within = tuple(each % count for each in given if x.rows is None or each % count)
        of_rows = apply(lambda tensor: function(tensor, axis=within, keepdims=keepdims), x) if within else x
        return of_rows if len(within) == len(given) else Reduced(of_rows, kind, keepdims)

    return reduced


def _clipped(values: Any, min_value: float | None = None, max_value: float | None = None) -> Any:
    low, high = -numbers.inf if min_value is None else min_value, numbers.inf if max_value is None else max_value
    return ops.clip(values, low, high)


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return operation(lambda x: function(x))


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return operation(lambda x, y: function(x, y))


def _top_k(input: Any, axis: int = -1, k: int = 1, sorted: bool = True) -> Any:
    return ops.moveaxis(ops.top_k(ops.moveaxis(input, axis, -1), k, sorted)[1], -1, axis)


_UNARY = """exp log log1p expm1 sqrt rsqrt square negative sign floor ceil round sin cos tan sinh cosh tanh erf sigmoid
softplus relu logical_not reciprocal"""
_BINARY = """add subtract multiply divide floor_divide mod maximum minimum equal not_equal greater greater_equal less
less_equal logical_and"""
math = Names(
    "math",
    **{name: _unary(getattr(ops, name)) for name in _UNARY.split()},
    **{name: _binary(getattr(ops, name)) for name in _BINARY.split()},
    **{f"reduce_{kind}": _reduction(kind) for kind in ("mean", "sum", "max", "min")},
    abs=_unary(ops.absolute),
    pow=_binary(ops.power),
    gelu=_unary(lambda x: ops.gelu(x, approximate=False)),
    argmax=operation(lambda input, axis=-1: ops.argmax(input, axis)),
    top_k=operation(_top_k),
    clip_by_value=operation(_clipped),
    squared_difference=operation(lambda x, y: ops.square(x - y)),
)
cast = operation(lambda x, dtype: ops.cast(x, dtype))
identity = operation(lambda x: x)


# ---- flow.nn

_FORMATS = {"NCHW": "channels_first", "NHWC": "channels_last"}


def images(function: Callable[..., Any], x: Blob, data_format: str, *others: Blob) -> Blob:
    """Apply a function of images with channels last to images in either order.

    Not every engine computes convolutions with channels first on a CPU.

    Raises:
        FlowError: `data_format` is no order of dims.
    """
    if data_format.upper() not in _FORMATS:
        raise FlowError(f"data_format is one of {sorted(_FORMATS)}, got {data_format!r}")
    if data_format.upper() == "NHWC":
        return apply(function, x, *others)
    last = apply(keras.layers.Permute((2, 3, 1)), value_of(x, "nn"))
    return apply(keras.layers.Permute((3, 1, 2)), apply(function, last, *others))


def padding_of(padding: object) -> str:
    """Keras's name of a padding.

    Raises:
        FlowError: numbers, or another name.
    """
    if not isinstance(padding, str) or padding.upper() not in ("SAME", "VALID"):
        raise FlowError(f'padding is "SAME" or "VALID", got {padding!r}')
    return padding.lower()


@listed("nn.dropout", "x rate !noise_shape seed")
def _dropout(x: Blob, rate: float, seed: int | None = None) -> Blob:
    is_training = tracing.current("flow.nn.dropout").is_training
    return apply(keras.layers.Dropout(rate, seed=seed), x) if is_training and rate else x


def _bias_add(value: Blob, bias: Blob, data_format: str | None = None, name: str | None = None) -> Blob:
    is_last = len(value.shape) == 2 or (data_format or "NCHW").upper().endswith("C")
    trailing = () if is_last else (1,) * (len(value.shape) - 2)
    return apply(lambda x, b: x + ops.reshape(b, (-1, *trailing)), value, bias)


@listed("nn.conv2d", "input filters strides padding data_format dilations groups")
def _conv2d(
    input: Blob,
    filters: Blob,
    strides: Any = 1,
    padding: str = "VALID",
    data_format: str = "NCHW",
    dilations: Any = 1,
    groups: int = 1,  # the channels of the filters say it
) -> Blob:
    # OneFlow's kernels are [filters, channels, height, width], or with the channels last
    order = (2, 3, 1, 0) if data_format.upper() == "NCHW" else (1, 2, 3, 0)

    def convolved(x: Any, kernel: Any) -> Any:
        kernel = ops.transpose(kernel, order)
        return ops.conv(x, kernel, strides, padding_of(padding), "channels_last", dilations or 1)

    return images(convolved, input, data_format, filters)


def _pooling(kind: Callable[..., keras.Layer]) -> Callable[..., Blob]:
    def pooled(input: Blob, ksize: Any, strides: Any, padding: str = "VALID", data_format: str = "NCHW") -> Blob:
        return images(kind(ksize, strides, padding_of(padding), "channels_last"), input, data_format)

    return listed("nn pooling", "input ksize strides padding data_format !ceil_mode")(pooled)


def _loss(function: Callable[[Any, Any], Any], names: str = "input target reduction") -> Callable[..., Blob]:
    def loss(input: Blob, target: Blob, reduction: str = "mean") -> Blob:
        if reduction not in ("none", "mean", "sum"):
            raise FlowError(f'reduction is "none", "mean" or "sum", got {reduction!r}')
        values = apply(function, input, target)
        return values if reduction == "none" else _reduction(reduction)(values)

    return listed("nn loss", names)(loss)


def _sigmoid_cross_entropy(labels: Any, logits: Any) -> Any:
    return ops.relu(logits) - logits * labels + ops.softplus(-ops.absolute(logits))


nn = Names(
    "nn",
    relu=_unary(ops.relu),
    leaky_relu=operation(lambda x, alpha=0.2: ops.leaky_relu(x, alpha)),
    elu=operation(lambda x, alpha=1.0: ops.elu(x, alpha)),
    softmax=operation(lambda logits, axis=None: ops.softmax(logits, -1 if axis is None else axis)),
    logsoftmax=operation(lambda logits, axis=None: ops.log_softmax(logits, -1 if axis is None else axis)),
    dropout=_dropout,
    bias_add=_bias_add,
    conv2d=_conv2d,
    max_pool2d=_pooling(keras.layers.MaxPooling2D),
    avg_pool2d=_pooling(keras.layers.AveragePooling2D),
    sparse_softmax_cross_entropy_with_logits=operation(
        lambda labels, logits: ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    ),
    softmax_cross_entropy_with_logits=operation(
        lambda labels, logits: ops.categorical_crossentropy(labels, logits, from_logits=True)
    ),
    sigmoid_cross_entropy_with_logits=operation(_sigmoid_cross_entropy),
    MSELoss=_loss(lambda x, y: ops.square(y - x)),
    L1Loss=_loss(lambda x, y: ops.absolute(x - y)),
    BCEWithLogitsLoss=_loss(lambda x, y: _sigmoid_cross_entropy(y, x), "input target !weight !pos_weight reduction"),
)
