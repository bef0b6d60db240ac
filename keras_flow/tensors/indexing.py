"""Indexing with logical indices, as numpy's basic kind: numbers, slices, `...` and None."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from keras_flow.errors import FlowError
from keras_flow.tensors.global_tensor import GlobalTensor

_INSTEAD = ". kf.ops.take chooses by an array of whole numbers, kf.ops.where by a condition"


def get(x: GlobalTensor, key: object) -> GlobalTensor:
    """`x[key]`. Another global tensor of whole numbers takes rows: `kf.ops.take(x, key, axis=0)`."""
    from keras_flow.tensors import ops
    from keras_flow.tensors.running import run

    if isinstance(key, GlobalTensor):
        if "int" not in key.dtype:
            raise FlowError(f"an index of dtype {key.dtype}: whole numbers are legal{_INSTEAD}")
        return ops.take(x, key, axis=0)
    entries, new = _entries(x.shape, key)
    taken = run("getitem", _get, {"x": x, "key": entries})
    return ops.expand_dims(taken, new) if new else taken


def put(x: GlobalTensor, key: object, value: object) -> GlobalTensor:
    """`x` with `x[key] = value`, as a new tensor."""
    import numpy as np

    from keras_flow.tensors import ops
    from keras_flow.tensors.creation import full_like_layout
    from keras_flow.tensors.running import run

    entries, new = _entries(x.shape, key)
    if new:
        raise FlowError("None (a new dim) cannot stand in an index that is assigned to")
    shape = tuple(
        len(range(*entry.indices(length)))
        for entry, length in zip(entries, x.shape, strict=True)
        if isinstance(entry, slice)
    )
    if not isinstance(value, GlobalTensor):
        value = full_like_layout(x, np.asarray(value))
    extra = max(0, value.ndim - len(shape))
    kept = value.shape[extra:]
    if value.shape[:extra] != (1,) * extra or any(
        n not in (1, m) for n, m in zip(kept[::-1], shape[::-1], strict=False)
    ):
        raise FlowError(f"x[...] = value: a value of shape {value.shape} for a place of shape {shape}")
    if extra:
        value = ops.reshape(value, kept)
    if kept != shape:
        value = ops.broadcast_to(value, shape)
    return run("setitem", _put, {"x": x, "values": value, "key": entries})


def _get(x: Any, key: Sequence[Any]) -> Any:
    """Shapes only: what is computed is `local._getitem`."""
    import keras

    shape = [
        len(range(*entry.indices(length)))
        for entry, length in zip(key, x.shape, strict=True)
        if isinstance(entry, slice)
    ]
    return keras.KerasTensor(shape, x.dtype)


def _put(x: Any, values: Any, key: Sequence[Any]) -> Any:
    import keras

    return keras.KerasTensor(x.shape, x.dtype)


def _entries(shape: Sequence[int], key: object) -> tuple[list[Any], list[int]]:
    """One entry for each dim (a slice, or a number from 0 up), and the places of new dims in the result."""
    parts = list(key) if isinstance(key, tuple) else [key]
    count = sum(part is not None and part is not Ellipsis for part in parts)
    if count > len(shape):
        raise IndexError(f"too many indices for a tensor of shape {tuple(shape)}: {count}")
    wide = sum(part is Ellipsis for part in parts)
    if wide > 1:
        raise IndexError(f"an index has one ... at most, not {wide}")
    if not wide:
        parts.append(Ellipsis)
    where = next(place for place, part in enumerate(parts) if part is Ellipsis)
    parts[where : where + 1] = [slice(None)] * (len(shape) - count)
    entries: list[Any] = []
    new: list[int] = []
    place = 0
    for part in parts:
        if part is None:
            new.append(place)
            place += 1
            continue
        length = shape[len(entries)]
        if isinstance(part, slice):
            entries.append(part)
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
    return entries, new
