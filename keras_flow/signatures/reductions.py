"""Signatures of operators that combine elements along dims: reductions, scans, sorts, softmax, normalizations.

Dims along which elements are not combined may be split. A sum over a split dim is a partial sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from keras_flow.layout import itemsize
from keras_flow.signatures.call import OperatorCall, Signature
from keras_flow.signatures.registry import B, P, S, all_inputs_and_outputs, axes_of, off_axis, operators


def _kept(call: OperatorCall, ndim: int, reduced: frozenset[int]) -> Iterator[Signature]:
    """Splits of the dims that a reduction keeps."""
    for dim in range(ndim):
        if dim not in reduced:
            place = dim if call.option("keepdims") else dim - sum(removed < dim for removed in reduced)
            yield Signature((S(dim),), (S(place),))


@operators("max", "min", "amax", "amin", "prod", "any", "all", "var", "std", "logsumexp", "norm", "median")
@operators("count_nonzero")
def _reduce(call: OperatorCall) -> Iterator[Signature]:
    yield from _kept(call, len(call.inputs[0]), axes_of(call, len(call.inputs[0])))


@operators("sum")
def _sum(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    reduced = axes_of(call, ndim)
    yield from _kept(call, ndim, reduced)
    yield from (Signature((S(dim),), (P,)) for dim in sorted(reduced))
    yield Signature((P,), (P,))


@operators("mean")
def _mean(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    yield from _kept(call, ndim, axes_of(call, ndim))
    # Keras adds half precision up in float32 and rounds once; the means of summands would each be rounded
    if all(itemsize(dtype) >= 4 for dtype in call.dtypes):
        yield Signature((P,), (P,))


@operators("argmax", "argmin")
def _arg(call: OperatorCall) -> Iterator[Signature]:
    if call.option("axis") is not None:
        yield from _kept(call, len(call.inputs[0]), axes_of(call, len(call.inputs[0])))


@operators("softmax", "log_softmax", "sort", "argsort", "layer_normalization", "rms_normalization", "normalize", "glu")
def _along_last(call: OperatorCall) -> Iterator[Signature]:
    for signature in off_axis(call, -1):  # further inputs are weights of the combined dim
        yield Signature((signature.inputs[0], *[B] * (len(call.inputs) - 1)), signature.outputs)


@operators("cumsum")
def _cumsum(call: OperatorCall) -> Iterator[Signature]:
    if call.option("axis") is not None:
        yield from off_axis(call, -1)
        yield all_inputs_and_outputs(call, P)


@operators("cumprod")
def _cumprod(call: OperatorCall) -> Iterator[Signature]:
    if call.option("axis") is not None:
        yield from off_axis(call, -1)


@operators("top_k")
def _top_k(call: OperatorCall) -> Iterator[Signature]:
    for dim in range(len(call.inputs[0]) - 1):
        yield all_inputs_and_outputs(call, S(dim))


@operators("categorical_crossentropy", "sparse_categorical_crossentropy")
def _crossentropy(call: OperatorCall) -> Iterator[Signature]:
    """Splits of all dims but that of the classes, which sparse targets (class numbers) do not have."""
    output = call.inputs[-1]
    along = axes_of(call, len(output), default=-1)
    # targets of class numbers, like the result, lack the dim of classes
    for place, dim in enumerate(dim for dim in range(len(output)) if dim not in along):
        target = S(place if call.name.startswith("sparse") else dim)
        yield Signature((target, S(dim))[-len(call.inputs) :], (S(place),))


@operators("batch_normalization")
def _batch_normalization(call: OperatorCall) -> Iterator[Signature]:
    """x [..., c, ...] and vectors [c] (moving statistics, gamma, beta): any dim; the channels in the vectors too."""
    channel = next(iter(axes_of(call, len(call.inputs[0]))))
    vectors = len(call.inputs) - 1
    for dim in range(len(call.inputs[0])):
        yield Signature((S(dim), *[S(0) if dim == channel else B] * vectors), (S(dim),))
