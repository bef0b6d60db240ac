"""The computation of one rank for an operator: the operator itself on the rank's shards.

Most operators are the same on a shard as on the logical tensor. The others are here: arguments that state the logical
shape (`reshape`, `broadcast_to`) get the rank's own, and those that name logical places (indices, classes, dims of
length 1) are computed by a function in `_WITH_PLACES`.

Example: `x[2:5]` of 8 rows split over 4 ranks. Rank 1 holds rows 2 and 3, which are rows 0 and 1 of the result: it
gives these, and zeros for the third row. Rank 2 gives the third row, and ranks 0 and 3 give zeros only. The signature
of `getitem` along a split dim is `S(0) -> P`, so the sum over the ranks is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops, tree

from keras_flow.layout import Layout
from keras_flow.sbp import Split
from keras_flow.signatures import OperatorCall
from keras_flow.tensors import keras_operators
from keras_flow.tensors.global_tensor import GlobalTensor

_REDUCTIONS = frozenset(["sum", "mean", "max", "min", "amax", "amin", "prod", "any", "all", "var", "std", "logsumexp"])

#: operator -> its argument that is the result's shape
_SHAPE_ARGUMENT = {"reshape": "newshape", "broadcast_to": "shape"}


def function_of_rank(
    call: OperatorCall,
    operator: Callable[..., Any],
    arguments: Mapping[str, Any],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    rank: int,
) -> Callable[..., list[Any]]:
    """The function from the shards of a rank to its shards of the results.

    Args:
        call: the operator with logical shapes.
        operator: computes it on arrays of the engine.
        arguments: parameter -> value, global tensors among them.
        inputs: layouts that the tensors among the arguments have now, in order.
        outputs: layouts of the results.
        rank: the rank that calls the function.
    """
    with_places = _WITH_PLACES.get(call.name)
    replaced = dict(arguments)
    # `reshape(x, (8, 3))` with rows split over 2 ranks is `reshape(shard, (4, 3))` on each
    if call.name in _SHAPE_ARGUMENT:
        replaced[_SHAPE_ARGUMENT[call.name]] = outputs[0].local_shape(rank)
    if call.name in _REDUCTIONS and replaced["axis"] is None and replaced["keepdims"]:
        if call.inputs[0]:
            # on torch Keras 3.15 forgets keepdims where axis is None
            replaced["axis"] = tuple(range(len(call.inputs[0])))
        else:
            replaced["keepdims"] = False  # for a scalar Keras 3.15 adds a dim (logsumexp)

    def compute(*shards: Any) -> list[Any]:
        if with_places is not None:
            result = with_places(call, inputs, outputs, rank, *shards)
            if result is not None:
                return [result]
        # shards come in the order in which the tensors stand among the arguments
        rest = iter(shards)
        filled = {
            key: tree.map_structure(lambda leaf: next(rest) if isinstance(leaf, GlobalTensor) else leaf, value)
            for key, value in replaced.items()
        }
        return tree.flatten(keras_operators.call(operator, filled))

    return compute


# ---- operators whose arguments name logical places: the result, or None where the operator itself is right


def _take(
    call: OperatorCall, inputs: Sequence[Layout], outputs: Sequence[Layout], rank: int, table: Any, indices: Any = None
) -> Any:
    """Rows of a table whose rows are split: each rank gives zeros for rows of others, so that the sum is the result.

    An index out of range stays so in the shard: engines raise, or fill with NaN (JAX), as they do on one device.
    """
    if indices is None:
        indices = ops.convert_to_tensor(call.option("indices"))
    if call.option("axis") is None:
        # on torch Keras 3.15 wraps negative indices by the length of dim 0, not by that of the flattened table
        return ops.take(ops.reshape(table, (-1,)), indices, axis=0)
    axis = int(call.option("axis")) % len(call.inputs[0])
    # the rank has all rows: the operator itself is right
    if not any(part == Split(axis) for part in inputs[0].nd_sbp):
        return None
    # the rows that this rank has, and how many there are in all
    block, length = inputs[0].local_slices(rank)[axis], call.inputs[0][axis]
    if block.stop == block.start:
        return ops.zeros(outputs[0].local_shape(rank), table.dtype)
    # indices of 8 bits would overflow when the length is added
    wide: Any = ops.cast(indices, "int64" if length > 2**31 - 1 else "int32")
    wrapped: Any = ops.where(wide < 0, wide + length, wide)
    is_here = ops.logical_and(wrapped >= block.start, wrapped < block.stop)
    is_elsewhere = ops.logical_and(ops.logical_not(is_here), ops.logical_and(wrapped >= 0, wrapped < length))
    # rows of other ranks read row 0, which `where` replaces below; `length` is out of range on every rank
    own = ops.where(is_here, wrapped - block.start, ops.where(is_elsewhere, 0, length))
    rows: Any = ops.take(table, own, axis=axis)
    # the mask over looked-up rows, with dims of 1 for those of the table, to broadcast
    shape = (1,) * axis + tuple(indices.shape) + (1,) * (len(call.inputs[0]) - axis - 1)
    return ops.where(ops.reshape(is_elsewhere, shape), ops.zeros((), rows.dtype), rows)


def _squeeze(call: OperatorCall, inputs: Sequence[Layout], outputs: Sequence[Layout], rank: int, x: Any) -> Any:
    """Only dims of logical length 1 go: a dim of which this rank has one element stays."""
    return ops.reshape(x, outputs[0].local_shape(rank))


def _one_hot(call: OperatorCall, inputs: Sequence[Layout], outputs: Sequence[Layout], rank: int, indices: Any) -> Any:
    """The columns of this rank's classes, where the dim of the classes is split."""
    new = int(call.option("axis", -1)) % len(call.outputs[0])
    block = outputs[0].local_slices(rank)[new]
    if block == slice(0, call.outputs[0][new]):
        return None
    # the numbers of this rank's classes along the new dim: [1, ..., classes, ..., 1]
    shape = [1] * len(call.outputs[0])
    shape[new] = block.stop - block.start
    wide: Any = keras_operators.wide_indices(indices)
    classes = ops.reshape(ops.arange(block.start, block.stop, dtype=wide.dtype), shape)
    return ops.cast(ops.equal(ops.expand_dims(wide, new), classes), call.option("dtype") or "float32")


def _local_entries(call: OperatorCall, layout: Layout, rank: int) -> list[tuple[Any, int, int]] | None:
    """An index into the logical tensor as an index into the shard of a rank.

    Returns:
        For each dim of the tensor the local entry (a number or a slice), and which places of the result's dim it fills:
        start and count. None where this rank has nothing of what is indexed.
    """
    found: list[tuple[Any, int, int]] = []
    for entry, block, length in zip(call.option("key"), layout.local_slices(rank), call.inputs[0], strict=True):
        if not isinstance(entry, slice):
            if not block.start <= entry < block.stop:
                return None
            found.append((entry - block.start, 0, 1))
            continue
        # a slice as the logical indices that it names: 7:2:-2 of 8 is 7, 5, 3
        wanted = range(*entry.indices(length))
        near, far = (block.start, block.stop) if wanted.step > 0 else (block.stop - 1, block.start - 1)
        # the places of those in the block: from the first that is not before it, rounded up, to the first past it
        begin = max(0, -((wanted.start - near) // wanted.step))
        end = min(len(wanted), -((wanted.start - far) // wanted.step))
        if begin >= end:
            return None
        first, last = wanted[begin] - block.start, wanted[end - 1] - block.start
        stop = last + (1 if wanted.step > 0 else -1)
        # a stop of -1 would mean the last element: going down past 0 is written None
        found.append((slice(first, None if stop < 0 else stop, wanted.step), begin, end - begin))
    return found


def _getitem(call: OperatorCall, inputs: Sequence[Layout], outputs: Sequence[Layout], rank: int, x: Any) -> Any:
    """The elements of `x[key]` that this rank has, at their places in the result, and zeros elsewhere."""
    shape = outputs[0].local_shape(rank)
    entries = _local_entries(call, inputs[0], rank)
    if entries is None or 0 in shape:
        return ops.zeros(shape, x.dtype)
    taken = _index(x, [entry for entry, *_ in entries])
    places = [
        (place, count)
        for (_, place, count), entry in zip(entries, call.option("key"), strict=True)
        if isinstance(entry, slice)
    ]
    is_whole = [length == wanted for length, wanted in zip(taken.shape, shape, strict=True)]
    if all(is_whole):
        return taken
    # zeros where other ranks have the elements, so that the sum over the ranks is the result
    padding = [
        (0, 0) if whole else (place, wanted - place - count)
        for whole, (place, count), wanted in zip(is_whole, places, shape, strict=True)
    ]
    return ops.pad(taken, padding)


def _index(x: Any, entries: Sequence[Any]) -> Any:
    """`x[entries]`; a negative step, which torch refuses, is the same slice upwards, then flipped."""
    flipped = []
    key = []
    place = 0
    for entry in entries:
        if isinstance(entry, slice) and entry.step is not None and entry.step < 0:
            stop = -1 if entry.stop is None else entry.stop
            count = len(range(entry.start, stop, entry.step))
            last = entry.start + (count - 1) * entry.step
            entry = slice(last, entry.start + 1, -entry.step)
            flipped.append(place)
        key.append(entry)
        place += isinstance(entry, slice)
    taken = x[tuple(key)] if key else x
    return ops.flip(taken, flipped) if flipped else taken


def _setitem(
    call: OperatorCall, inputs: Sequence[Layout], outputs: Sequence[Layout], rank: int, target: Any, values: Any
) -> Any:
    """The shard of `target` with those of the new values that fall on this rank.

    Of a dim that `key` keeps whole the values are split as the target is; of one that it cuts they are whole.
    """
    entries = _local_entries(call, inputs[0], rank)
    if entries is None or 0 in tuple(target.shape):
        return ops.copy(target)
    if not entries:  # a scalar is assigned to as a whole
        return ops.cast(values, target.dtype)
    indices, cut = [], []
    for dim, ((local, place, count), entry) in enumerate(zip(entries, call.option("key"), strict=True)):
        if isinstance(entry, slice):
            indices.append(list(range(*local.indices(target.shape[dim]))))
            cut.append(entry if entry == slice(None) else slice(place, place + count))
        else:
            indices.append([local])
    # scatter_update wants the coordinates of each element: [elements, dims]
    grid = np.stack([coordinate.ravel() for coordinate in np.meshgrid(*indices, indexing="ij")], -1)
    chosen = values[tuple(cut)] if cut else values
    updates = ops.reshape(ops.cast(chosen, target.dtype), (len(grid),))
    return keras_operators.scatter_update(target, grid, updates)


_WITH_PLACES: dict[str, Callable[..., Any]] = {
    "take": _take,
    "squeeze": _squeeze,
    "one_hot": _one_hot,
    "getitem": _getitem,
    "setitem": _setitem,
}
