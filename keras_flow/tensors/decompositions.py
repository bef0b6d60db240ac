"""Operators along a split dim, written as several operators that each run on shards.

Each function has the name and the arguments of an operator of `keras.ops` and gives the same result; dispatch calls it
in the operator's place where a dim of `axis` is split and where it receives fewer bytes. A mean over split rows is a
sum on each rank, an all-reduce of the sums and a division, where the operator itself would gather all rows first.

The order of operations is that of `keras.ops`: statistics in float32 at least, the largest element subtracted before
`exp`, the same epsilon at the same place.

Example: `softmax` over a dim that 2 ranks split: they exchange a largest element and a sum for each row, not the row.

    >>> import keras_flow as kf
    >>> x = kf.tensor([[1.0, 1.0, 1.0, 1.0]], placement=kf.Placement([0, 1]), sbp="S(1)")
    >>> print(kf.ops.softmax(x).to_local(rank=0))
    [[0.25 0.25]]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_flow import sbp as _sbp
from keras_flow.layout import Layout
from keras_flow.sbp import Split
from keras_flow.tensors import creation, ops, tape
from keras_flow.tensors.dispatch import compute_on_ranks, decomposes
from keras_flow.tensors.global_tensor import GlobalTensor, without_partial

Dims = tuple[int, ...]

# ---- parts that several decompositions need


def _cast(x: GlobalTensor, dtype: str) -> GlobalTensor:
    return x if x.dtype == dtype else ops.cast(x, dtype)


def _at_least_float32(x: GlobalTensor) -> GlobalTensor:
    """In the dtype in which Keras computes statistics."""
    return _cast(x, keras.backend.result_type(x.dtype, "float32"))


def _dtype_of_statistics(dtype: str) -> str:
    """The dtype in which Keras returns statistics of a tensor."""
    return keras.backend.result_type(dtype, float)


def _reduced(x: GlobalTensor) -> GlobalTensor:
    """Finish the sums of a tensor that is read more than once: a partial sum would be reduced at each reading."""
    return x.to_global(sbp=without_partial(x.sbp))


def _largest(x: GlobalTensor, dims: Dims) -> GlobalTensor:
    """The largest elements, to be subtracted before `exp` overflows; they cancel, so they need no gradient."""
    with tape.paused():
        return ops.max(x, axis=dims, keepdims=True)


def _root(x: GlobalTensor) -> GlobalTensor:
    """The square root, of which the gradient at 0 is 0 as torch's statistics have it, and not NaN."""
    x = _reduced(x)
    is_zero = ops.equal(x, 0.0)
    return ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, x)))


def _made_global(value: Any, like: GlobalTensor) -> GlobalTensor:
    """An array as a global tensor, broadcast to the ranks of `like`."""
    if isinstance(value, GlobalTensor):
        return value
    return creation.tensor(value, placement=like.placement, sbp=(_sbp.broadcast,) * like.placement.ndim)


# ---- statistics


@decomposes("mean", along="x")
def mean(x: GlobalTensor, axis: Dims, keepdims: bool) -> GlobalTensor:
    """The sum divided by the count."""
    # of the logical tensor, known without communication: only the sums have to be reduced
    count = math.prod(x.shape[dim] for dim in axis)
    total = ops.sum(_at_least_float32(x), axis=axis, keepdims=keepdims)
    return _cast(ops.divide(total, float(count)), _dtype_of_statistics(x.dtype))


@decomposes("var", along="x")
def var(x: GlobalTensor, axis: Dims, keepdims: bool) -> GlobalTensor:
    """The mean square of the difference from the mean."""
    precise = _at_least_float32(x)
    off = precise - _reduced(ops.mean(precise, axis=axis, keepdims=True))
    return _cast(ops.mean(ops.square(off), axis=axis, keepdims=keepdims), _dtype_of_statistics(x.dtype))


@decomposes("std", along="x")
def std(x: GlobalTensor, axis: Dims, keepdims: bool) -> GlobalTensor:
    """The root of the variance."""
    return _root(ops.var(x, axis=axis, keepdims=keepdims))


@decomposes("moments", along="x", axis="axes")
def moments(x: GlobalTensor, axes: Dims, keepdims: bool, synchronized: bool) -> tuple[GlobalTensor, GlobalTensor]:
    """Mean and variance. Global tensors are always synchronized, as their statistics are those of all ranks."""
    precise = _at_least_float32(x)
    # synchronized or not: the argument says whether replicas exchange sums, and there is one logical tensor here
    both = ops.mean(precise, axis=axes, keepdims=keepdims), ops.var(precise, axis=axes, keepdims=keepdims)
    if x.dtype == "float16":  # as keras.ops: what float16 cannot hold becomes its largest number
        both = tuple(ops.clip(moment, -65504.0, 65504.0) for moment in both)
    dtype = _dtype_of_statistics(x.dtype)
    return _cast(both[0], dtype), _cast(both[1], dtype)


def _is_elementwise_norm(arguments: Mapping[str, Any], dims: Dims) -> bool:
    """Whether a norm is made of its elements one by one; other norms of matrices need the whole matrix."""
    order = arguments["ord"]
    return order in (None, "fro") or (len(dims) == 1 and order in (1, 2, math.inf, -math.inf))


@decomposes("norm", along="x", only_if=_is_elementwise_norm)
def norm(x: GlobalTensor, ord: Any, axis: Dims, keepdims: bool) -> GlobalTensor:
    """Vector norms and the Frobenius norm, by a sum or an extreme of the elements."""
    # before the squares, which half precision could not hold
    x = _cast(x, _dtype_of_statistics(x.dtype))
    if ord in (math.inf, -math.inf):
        return (ops.max if ord > 0 else ops.min)(ops.absolute(x), axis=axis, keepdims=keepdims)
    if ord == 1:
        return ops.sum(ops.absolute(x), axis=axis, keepdims=keepdims)
    return _root(ops.sum(ops.square(x), axis=axis, keepdims=keepdims))


# ---- extremes


@decomposes("amax", along="x")
@decomposes("max", along="x")
def max_(x: GlobalTensor, axis: Dims, **others: Any) -> GlobalTensor:
    """The largest elements: each rank finds those of its shard, which are gathered and compared."""
    return _extreme("max", x, axis, others)


@decomposes("amin", along="x")
@decomposes("min", along="x")
def min_(x: GlobalTensor, axis: Dims, **others: Any) -> GlobalTensor:
    """The smallest elements, as `max_`."""
    return _extreme("min", x, axis, others)


def _extreme(name: str, x: GlobalTensor, dims: Dims, others: Mapping[str, Any]) -> GlobalTensor:
    """The extremes of those of the shards.

    All elements that are equal to an extreme share its gradient. An engine would share it between blocks first, and
    then in each: of 3, 3 and 1, 3 on two ranks the last would have a half.
    """
    extremes, *counts = _extremes_of_blocks(name, x, dims, counted=tape.watches([x]))
    if counts:
        whole = tuple(_sbp.broadcast if isinstance(part, Split) and part.dim in dims else part for part in extremes.sbp)
        both = [each.to_global(sbp=whole) for each in (extremes, *counts)]
        reduce = functools.partial(getattr(keras.ops, name), axis=dims, keepdims=True)
        share = functools.partial(_shared_by_count, reduce=reduce, dims=dims)
        (extremes,) = compute_on_ranks(lambda _: share, both, both, [both[0].layout], [x.dtype])
    return getattr(ops, name).without_decomposition(extremes, axis=dims, **others)


def _shared_by_count(extremes: Any, counts: Any, reduce: Callable[..., Any], dims: Dims) -> list[Any]:
    """The extremes themselves, the gradient of each scaled by its block's part of the elements that are equal."""
    is_extreme = extremes == reduce(extremes)
    equal: Any = keras.ops.cast(keras.ops.where(is_extreme, counts, 0), "float32")
    blocks: Any = keras.ops.sum(keras.ops.cast(is_extreme, "float32"), axis=dims, keepdims=True)
    scale: Any = keras.ops.cast(equal * blocks / keras.ops.sum(equal, axis=dims, keepdims=True), extremes.dtype)
    # this is 0, with a gradient; the difference of infinities would be NaN
    finite: Any = keras.ops.where(keras.ops.isfinite(extremes), extremes, keras.ops.zeros_like(extremes))
    return [extremes + (finite - keras.ops.stop_gradient(finite)) * (scale - 1)]


def _extremes_of_blocks(name: str, x: GlobalTensor, dims: Sequence[int], counted: bool) -> list[GlobalTensor]:
    """The extremes of each shard over `dims`: a split dim gets the length of its blocks, an unsplit one length 1.

    Args:
        name: `"max"` or `"min"`.
        x: partial sums are reduced first, and a split that leaves a rank nothing is made broadcast first.
        dims: dims as numbers from 0 up.
        counted: also return how many elements of the shard are equal to each.
    """
    x = _reduced(x)
    split = {part.dim for part in x.sbp if isinstance(part, Split) and part.dim in dims}
    if any(x.shape[dim] < x.layout.parts_of_dim(dim) for dim in split):  # an empty shard has no largest element
        x = x.to_global(sbp=tuple("B" if isinstance(part, Split) and part.dim in split else part for part in x.sbp))
        split = set()
    shape = [
        (x.layout.parts_of_dim(dim) if dim in split else 1) if dim in dims else length
        for dim, length in enumerate(x.shape)
    ]

    def of_shard(shard: Any) -> list[Any]:
        found = getattr(keras.ops, name)(shard, axis=tuple(dims), keepdims=True)
        if not counted:
            return [found]
        return [found, keras.ops.sum(keras.ops.cast(shard == found, "int32"), axis=tuple(dims), keepdims=True)]

    dtypes = [x.dtype, "int32"][: 1 + counted]
    return compute_on_ranks(lambda _: of_shard, [x], [x], [Layout(x.placement, x.sbp, shape)] * len(dtypes), dtypes)


# ---- softmax and its relatives


@decomposes("logsumexp", along="x")
def logsumexp(x: GlobalTensor, axis: Dims, keepdims: bool) -> GlobalTensor:
    """`log(sum(exp(x)))`, with the largest element taken out."""
    top = _largest(x, axis)
    # log(sum(exp(x))) = log(sum(exp(x - top))) + top for any top
    top = ops.where(ops.isfinite(top), top, 0.0)  # where all are -inf the result is -inf, and -inf - -inf is NaN
    total = ops.log(ops.sum(ops.exp(x - top), axis=axis, keepdims=True)) + top
    return total if keepdims else ops.squeeze(total, axis)


@decomposes("softmax", along="x")
def softmax(x: GlobalTensor, axis: Dims) -> GlobalTensor:
    """`exp(x)` divided by its sum, with the largest element taken out."""
    # at most 1, so that nothing overflows
    parts = ops.exp(x - _largest(x, axis))
    return parts / _reduced(ops.sum(parts, axis=axis, keepdims=True))


@decomposes("log_softmax", along="x")
def log_softmax(x: GlobalTensor, axis: Dims) -> GlobalTensor:
    """`x - log(sum(exp(x)))`, with the largest element taken out."""
    # the logarithm of the sum, not of each quotient: small probabilities stay apart from 0
    off = x - _largest(x, axis)
    return off - ops.log(ops.sum(ops.exp(off), axis=axis, keepdims=True))


@decomposes("categorical_crossentropy", along="output")
def categorical_crossentropy(target: Any, output: GlobalTensor, from_logits: bool, axis: Dims) -> GlobalTensor:
    """Minus the sum of target times log probability over the split classes."""
    target = _made_global(target, output)
    return ops.negative(ops.sum(target * _log_probabilities(output, from_logits, axis), axis=axis[0]))


@decomposes("sparse_categorical_crossentropy", along="output")
def sparse_categorical_crossentropy(target: Any, output: GlobalTensor, from_logits: bool, axis: Dims) -> GlobalTensor:
    """Compute `categorical_crossentropy` with one-hot targets that each rank makes for its classes."""
    classes = _made_global(target, output)
    # targets [rows, 1] are accepted as [rows], as by keras.ops
    if classes.ndim == output.ndim and classes.shape[-1] == 1:
        classes = ops.squeeze(classes, -1)
    target = ops.one_hot(classes, output.shape[axis[0]], axis=axis[0], dtype="bool")
    # no product: that of 0 and the logarithm of an impossible class is NaN
    chosen = ops.where(target, _log_probabilities(output, from_logits, axis), 0.0)
    return ops.negative(ops.sum(chosen, axis=axis[0]))


def _log_probabilities(output: GlobalTensor, from_logits: bool, axis: Dims) -> GlobalTensor:
    """Return logarithms as `keras.ops` does: probabilities are scaled to a sum of one and clipped."""
    if from_logits:
        return ops.log_softmax(output, axis=axis[0])
    epsilon = keras.config.epsilon()
    output = output / _reduced(ops.sum(output, axis=axis, keepdims=True))
    return ops.log(ops.clip(output, epsilon, 1.0 - epsilon))


# ---- normalisations


@decomposes("rms_normalization", along="x")
def rms_normalization(x: GlobalTensor, scale: Any, axis: Dims, epsilon: float | None) -> GlobalTensor:
    """`x` divided by its root mean square."""
    precise = _at_least_float32(x)
    result = _normalized(precise, precise, axis, epsilon)
    return _cast(result if scale is None else result * scale, x.dtype)


@decomposes("layer_normalization", along="x")
def layer_normalization(
    x: GlobalTensor, gamma: Any, beta: Any, axis: Dims, epsilon: float | None, kwargs: dict[str, Any]
) -> GlobalTensor:
    """`x` less its mean, divided by its standard deviation."""
    precise = _at_least_float32(x)
    off = precise - _reduced(ops.mean(precise, axis=axis, keepdims=True))
    is_rms = kwargs.get("rms_scaling", False)  # an older argument of Keras: the mean stays and beta is not used
    result = _normalized(precise if is_rms else off, off, axis, epsilon)
    if gamma is not None:
        result = result * _along(gamma, precise, axis)
    if beta is not None and not is_rms:
        result = result + _along(beta, precise, axis)
    return _cast(result, x.dtype)


def _normalized(x: GlobalTensor, off: GlobalTensor, dims: Dims, epsilon: float | None) -> GlobalTensor:
    """`x` divided by the root of the mean square of `off`."""
    square = _reduced(ops.mean(ops.square(off), axis=dims, keepdims=True))
    return x * ops.rsqrt(square + (keras.config.epsilon() if epsilon is None else epsilon))


def _along(vector: Any, x: GlobalTensor, dims: Dims) -> GlobalTensor:
    """Gamma or beta, reshaped to broadcast against `x`."""
    shape = [x.shape[dim] if dim in dims else 1 for dim in range(x.ndim)]
    return ops.reshape(_cast(_made_global(vector, x), x.dtype), shape)
