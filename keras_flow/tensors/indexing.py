"""Indexing: `x[key]` and `x[key] = value` with logical indices, of numpy's basic kind: numbers, slices, `...`, None.

A key becomes one entry for each dim, and the operators `getitem` and `setitem`, which only this module calls, are
dispatched with these. What each rank does with an entry is in `per_rank.py`.

>>> import keras_flow as kf
>>> x = kf.arange(8, placement=kf.Placement([0, 1]), sbp="S(0)")
>>> x[2:6].sbp, x[2:6].numpy()
((P,), array([2, 3, 4, 5], dtype=int32))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_flow.errors import FlowError
from keras_flow.tensors import ops
from keras_flow.tensors.creation import broadcast_like
from keras_flow.tensors.dispatch import run
from keras_flow.tensors.global_tensor import GlobalTensor

_INSTEAD = ". kf.ops.take chooses by an array of whole numbers, kf.ops.where by a condition"


def get(x: GlobalTensor, key: object) -> GlobalTensor:
    """`x[key]`. A global tensor of whole numbers as the key takes rows: `kf.ops.take(x, key, axis=0)`.

    Raises:
        FlowError: a key of another kind.
        IndexError: more entries than dims, or a number out of range.
    """
    if isinstance(key, GlobalTensor):
        if "int" not in key.dtype:
            raise FlowError(f"an index of dtype {key.dtype}: whole numbers are legal{_INSTEAD}")
        return ops.take(x, key, axis=0)
    entries, new_dims = _entries(x.shape, key)
    result = run("getitem", _describe_get, {"x": x, "key": entries})
    return ops.expand_dims(result, new_dims) if new_dims else result


def put(x: GlobalTensor, key: object, value: object) -> GlobalTensor:
    """A new tensor: `x` with `value`, broadcast to the shape of `x[key]`, in the place of `x[key]`.

    Raises:
        FlowError: a key of another kind, or a value of a shape that does not broadcast.
        IndexError: as for `get`.
    """
    entries, new_dims = _entries(x.shape, key)
    if new_dims:
        raise FlowError("None (a new dim) cannot stand in an index that is assigned to")
    shape = tuple(
        len(range(*entry.indices(length)))
        for entry, length in zip(entries, x.shape, strict=True)
        if isinstance(entry, slice)
    )
    if not isinstance(value, GlobalTensor):
        value = broadcast_like(x, np.asarray(value))
    extra = max(0, value.ndim - len(shape))  # numpy ignores leading dims of length 1 of the value
    kept = value.shape[extra:]
    if value.shape[:extra] != (1,) * extra or any(
        n not in (1, m) for n, m in zip(kept[::-1], shape[::-1], strict=False)
    ):
        raise FlowError(f"x[...] = value: a value of shape {value.shape} for a place of shape {shape}")
    if extra:
        value = ops.reshape(value, kept)
    if kept != shape:
        value = ops.broadcast_to(value, shape)
    return run("setitem", _describe_put, {"x": x, "values": value, "key": entries})


def _describe_get(x: Any, key: Sequence[Any]) -> Any:
    """Shape and dtype of the result; `per_rank` computes it."""
    shape = [
        len(range(*entry.indices(length)))
        for entry, length in zip(key, x.shape, strict=True)
        if isinstance(entry, slice)
    ]
    return keras.KerasTensor(shape, x.dtype)


def _describe_put(x: Any, values: Any, key: Sequence[Any]) -> Any:
    """Shape and dtype of the result; `per_rank` computes it."""
    return keras.KerasTensor(x.shape, x.dtype)


def _entries(shape: Sequence[int], key: object) -> tuple[list[Any], list[int]]:
    """A key as one entry for each dim, and the places of new dims in the result.

    An entry is a number from 0 up, or a slice: `slice(None)` where the dim is kept whole, however the key says it.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    count = sum(part is not None and part is not Ellipsis for part in parts)
    if count > len(shape):
        raise IndexError(f"too many indices for a tensor of shape {tuple(shape)}: {count}")
    ellipses = sum(part is Ellipsis for part in parts)
    if ellipses > 1:
        raise IndexError(f"an index has one ... at most, not {ellipses}")
    if not ellipses:
        parts.append(Ellipsis)
    where = next(place for place, part in enumerate(parts) if part is Ellipsis)
    parts[where : where + 1] = [slice(None)] * (len(shape) - count)
    entries: list[Any] = []
    new_dims: list[int] = []
    place = 0  # dim of the result that the next slice or None makes
    for part in parts:
        if part is None:
            new_dims.append(place)
            place += 1
            continue
        length = shape[len(entries)]
        if isinstance(part, slice):
            # said of the logical dim: of what an outer axis leaves of it, 0:3 may be all
            is_whole = range(*part.indices(length)) == range(length)
            entries.append(slice(None) if is_whole else part)
            place += 1
            continue
        try:
            index = operator.index(part)  # type: ignore[arg-type]
            if isinstance(part, bool):
                raise TypeError("True and False are conditions")
        except TypeError as error:
            raise FlowError(
                "an index is a whole number, a slice, ... or None, or, to read, one global tensor of whole numbers; "
                f"got {part!r}{_INSTEAD}"
            ) from error
        if not -length <= index < length:
            raise IndexError(f"index {index} is out of range for dim {len(entries)} of length {length}")
        entries.append(index % length)
    return entries, new_dims
