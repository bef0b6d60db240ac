"""Reading and writing chosen places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.fuzz.drawing import Drawing
from tests.fuzz.operators.registry import any_float, any_tensor, axis_of, other, smooth


def _key(d: Drawing, shape: tuple[int, ...], new: bool) -> tuple:
    entries: list[Any] = []
    for length in shape[: d.random.randint(0, len(shape))]:
        kind = d.random.random()
        if kind < 0.3 and length:
            entries.append(d.random.randrange(-length, length))
            continue
        ends = [None, *range(-length - 1, length + 2)]
        steps = (None, None, 1, 2, -1, -2, 3)
        entries.append(slice(d.random.choice(ends), d.random.choice(ends), d.random.choice(steps)))
    if d.random.random() < 0.2:
        entries.insert(len(entries) if not new else 0, Ellipsis)
        if entries[0] is Ellipsis and len(entries) > 1:
            entries = [Ellipsis]
    if new and d.random.random() < 0.2:
        entries.insert(d.random.randint(0, len(entries)), None)
    return tuple(entries)


@smooth
def getitem(d: Drawing) -> None:
    x = any_tensor(d, 1)
    d.note("operator.getitem", (x, _key(d, d.array(x).shape, True)))


@other
def setitem(d: Drawing) -> None:
    x = any_float(d, 1)
    array = d.array(x)
    key = _key(d, array.shape, False)
    shape = array[key].shape
    if d.random.random() < 0.5:
        d.note("setitem", (x, key, 0.75))
    else:
        value = d.tensor(tuple(1 if d.random.random() < 0.2 else n for n in shape), ranks=d.ranks(x))
        d.note("setitem", (x, key, value))


@other
def scattered(d: Drawing) -> None:
    x = any_float(d, 1, nonempty=True)
    shape = d.array(x).shape
    start = tuple(d.random.randrange(n) for n in shape)
    count = tuple(d.random.randint(1, n - first) for n, first in zip(shape, start, strict=True))
    kind = d.random.random()
    if kind < 0.4:
        d.note("slice", (x, start, count))
    elif kind < 0.7:
        d.note("slice_update", (x, start, d.tensor(count, ranks=d.ranks(x))))
    else:
        places = np.asarray([start, tuple((first + 1) % n for first, n in zip(start, shape, strict=True))], "int32")
        places = places[: 1 if (places[0] == places[1]).all() else 2]
        d.note("scatter_update", (x, places, d.tensor((len(places),), ranks=d.ranks(x))))


@smooth
def take(d: Drawing) -> None:
    x = any_tensor(d, 1)
    array = d.array(x)
    axis = axis_of(d, array.ndim)
    length = array.shape[axis]
    if not length:
        return
    if d.random.random() < 0.5:
        shape = d.shape(d.random.choice((0, 1, 2)))
        chosen = np.asarray([d.random.randrange(-length, length) for _ in range(math.prod(shape))], "int32").reshape(
            shape
        )
        d.note("take", (x, chosen), axis=axis)
        return
    indices = d.tensor(d.shape(d.random.choice((0, 1, 2))), "int32", d.ranks(x))
    wrapped = d.note("operator.mod", (indices, length))
    if wrapped is not None:
        d.note("take", (x, wrapped), axis=axis)


@other
def take_along_axis(d: Drawing) -> None:
    x = any_float(d, 1)
    array = d.array(x)
    axis = axis_of(d, array.ndim)
    if not array.shape[axis]:
        return
    shape = list(array.shape)
    shape[axis] = d.random.choice((1, 2, 3))
    wrapped = d.note("operator.mod", (d.tensor(tuple(shape), "int32", d.ranks(x)), array.shape[axis]))
    if wrapped is not None:
        d.note("take_along_axis", (x, wrapped), axis=axis)


@other
def one_hot(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype == "int32") or d.tensor(d.shape(1), "int32")
    d.note("one_hot", (x, d.random.choice((3, 5, 8))), axis=d.random.choice((-1, axis_of(d, d.array(x).ndim + 1))))
