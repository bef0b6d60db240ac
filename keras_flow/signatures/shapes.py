"""Signatures of operators that move elements and compute nothing: reshape, transpose, concatenate, slices ...

All are linear, so that P passes through them (`pad` only with zeros).
"""

from __future__ import annotations

from collections.abc import Iterator

from keras_flow.signatures.call import OperatorCall, Shape, Signature
from keras_flow.signatures.registry import B, P, S, all_inputs_and_outputs, axes_of, off_axis, operators


@operators("reshape")
def _reshape(call: OperatorCall) -> Iterator[Signature]:
    """A split stays with the first dim of each group of dims that are joined or cut (OneFlow's rule).

    Where lengths change both must divide, so that the local shapes are those of the layouts on every rank.
    """
    yield Signature((P,), (P,))
    shape, target = call.inputs[0], call.outputs[0]
    for before, after in _groups(shape, target):
        # uneven blocks of rows are not blocks of the reshaped tensor
        if shape[before] == target[after] or not (shape[before] % call.ranks or target[after] % call.ranks):
            yield Signature((S(before),), (S(after),))


def _groups(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """First dims of the shortest groups of dims whose products agree, from the left; dims of length 1 carry nothing.

    [6, 4] -> [2, 3, 4] has the groups 6 -> 2, 3 and 4 -> 4, so the pairs (0, 0) and (1, 2).
    """
    left = [dim for dim, length in enumerate(before) if length != 1]
    right = [dim for dim, length in enumerate(after) if length != 1]
    # a product of 0 agrees with anything
    if 0 in before:
        return
    i = j = 0
    while i < len(left) and j < len(right):
        first, second = left[i], right[j]
        joined_left, joined_right = before[first], after[second]
        # the smaller product takes the next dim, until both groups hold equally many elements
        while joined_left != joined_right:
            if joined_left < joined_right:
                i += 1
                joined_left *= before[left[i]]
            else:
                j += 1
                joined_right *= after[right[j]]
        yield first, second
        i, j = i + 1, j + 1


@operators("transpose")
def _transpose(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    order = call.option("axes") or tuple(reversed(range(ndim)))
    for place, dim in enumerate(order):
        yield Signature((S(dim % ndim),), (S(place),))
    yield Signature((P,), (P,))


@operators("swapaxes")
def _swapaxes(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    first, second = (int(call.option(name)) % ndim for name in ("axis1", "axis2"))
    for dim in range(ndim):
        yield Signature((S(dim),), (S({first: second, second: first}.get(dim, dim)),))
    yield Signature((P,), (P,))


@operators("expand_dims")
def _expand_dims(call: OperatorCall) -> Iterator[Signature]:
    new = axes_of(call, len(call.outputs[0]))
    places = [place for place in range(len(call.outputs[0])) if place not in new]
    yield from (Signature((S(dim),), (S(place),)) for dim, place in enumerate(places))
    yield Signature((P,), (P,))


@operators("squeeze")
def _squeeze(call: OperatorCall) -> Iterator[Signature]:
    shape = call.inputs[0]
    ones = [dim for dim, length in enumerate(shape) if length == 1]
    removed = ones if call.option("axis") is None else axes_of(call, len(shape))
    places = [dim for dim in range(len(shape)) if dim not in removed]
    yield from (Signature((S(dim),), (S(place),)) for place, dim in enumerate(places))
    yield Signature((P,), (P,))


@operators("broadcast_to")
def _broadcast_to(call: OperatorCall) -> Iterator[Signature]:
    before, after = call.inputs[0], call.outputs[0]
    first = len(after) - len(before)
    for dim in range(len(after)):
        stretched = dim < first or before[dim - first] != after[dim]
        yield Signature((B if stretched else S(dim - first),), (S(dim),))
    yield Signature((P,), (P,))


@operators("concatenate")
def _concatenate(call: OperatorCall) -> Iterator[Signature]:
    yield from off_axis(call, -1)
    yield all_inputs_and_outputs(call, P)


@operators("stack")
def _stack(call: OperatorCall) -> Iterator[Signature]:
    new = next(iter(axes_of(call, len(call.outputs[0]), default=0)))
    for dim in range(len(call.inputs[0])):
        yield Signature((S(dim),) * len(call.inputs), (S(dim if dim < new else dim + 1),))
    yield all_inputs_and_outputs(call, P)


@operators("split", "array_split", "roll", "flip")
def _along(call: OperatorCall) -> Iterator[Signature]:
    yield from off_axis(call, 0 if call.name != "flip" else -1) if call.option("axis") is not None else ()
    yield all_inputs_and_outputs(call, P)


@operators("repeat", "tile")
def _repeat(call: OperatorCall) -> Iterator[Signature]:
    before, after = call.inputs[0], call.outputs[0]
    first = len(after) - len(before)
    # counts of its own for each element may keep the length, and move elements from one rank's part to another's
    has_counts = call.name == "repeat" and not isinstance(call.option("repeats"), int)
    counted = axes_of(call, len(before)) if has_counts else ()
    if call.name == "tile" or call.option("axis") is not None:
        for dim, length in enumerate(before):
            if after[dim + first] == length and dim not in counted:
                yield Signature((S(dim),), (S(dim + first),))
    yield Signature((P,), (P,))


@operators("pad")
def _pad(call: OperatorCall) -> Iterator[Signature]:
    for dim, (before, after) in enumerate(zip(call.inputs[0], call.outputs[0], strict=True)):
        if before == after:
            yield all_inputs_and_outputs(call, S(dim))
    if call.option("mode", "constant") == "constant" and not call.option("constant_values"):
        yield all_inputs_and_outputs(call, P)


@operators("getitem")
def _getitem(call: OperatorCall) -> Iterator[Signature]:
    """Indices of numpy's basic kind, one entry for each dim: a slice, or a number that removes the dim.

    The lengths of a call are those that outer axes leave, so the entry itself says that a dim is whole: `slice(None)`.
    A split dim that is kept whole stays split. One that is cut gives P: each rank has its part of the result, and zeros
    for the rest.
    """
    place = 0
    for dim, entry in enumerate(call.option("key")):
        yield Signature((S(dim),), (S(place) if entry == slice(None) else P,))
        place += isinstance(entry, slice)
    yield Signature((P,), (P,))


@operators("setitem")
def _setitem(call: OperatorCall) -> Iterator[Signature]:
    """`x[key] = values`: dims that the key keeps whole are split in both; for a dim that it cuts, values are whole."""
    place = 0
    for dim, entry in enumerate(call.option("key")):
        yield Signature((S(dim), S(place) if entry == slice(None) else B), (S(dim),))
        place += isinstance(entry, slice)
    yield Signature((P, P), (P,))
