"""Signatures of operators that choose elements by index tensors: `take`, `take_along_axis`, `one_hot`."""

from __future__ import annotations

from collections.abc import Iterator

from keras_flow.signatures.call import OperatorCall, Signature
from keras_flow.signatures.registry import B, P, S, all_inputs_and_outputs, axes_of, operators


@operators("take")
def _take(call: OperatorCall) -> Iterator[Signature]:
    """A table [..., axis, ...] and indices of any shape, which take the place of the axis.

    From a table that is split along the axis each rank takes its own rows and zeros for the others': P.
    """
    table, *index_shapes = call.inputs  # no index tensor where the index is a Python number
    whole, ndim = (B,) * len(index_shapes), len(index_shapes[0]) if index_shapes else 0
    yield Signature((P, *whole), (P,))
    if call.option("axis") is None:
        return
    axis = int(call.option("axis")) % len(table)
    yield from (Signature((B, S(dim)), (S(axis + dim),)) for dim in range(ndim))
    for dim in range(len(table)):
        if dim != axis:
            yield Signature((S(dim), *whole), (S(dim if dim < axis else dim + ndim - 1),))
    yield Signature((S(axis), *whole), (P,))


@operators("take_along_axis")
def _take_along_axis(call: OperatorCall) -> Iterator[Signature]:
    x, indices = call.inputs
    if call.option("axis", -1) is None or len(x) != len(indices):
        return
    along = axes_of(call, len(x), default=-1)
    for dim in range(len(x)):
        if dim not in along and x[dim] == indices[dim]:
            yield all_inputs_and_outputs(call, S(dim))
    yield Signature((P, B), (P,))


@operators("one_hot")
def _one_hot(call: OperatorCall) -> Iterator[Signature]:
    new = next(iter(axes_of(call, len(call.outputs[0]), default=-1)))
    for dim in range(len(call.inputs[0])):
        yield Signature((S(dim),), (S(dim if dim < new else dim + 1),))
    yield Signature((B,), (S(new),))
