"""Operators that change shapes or layouts."""

from __future__ import annotations

from tests.fuzz.drawing import Drawing
from tests.fuzz.operators.registry import any_float, any_tensor, axis_of, other, smooth
from tests.fuzz.programs import PLACEMENTS


@smooth
def reshape(d: Drawing) -> None:
    x = any_tensor(d)
    size = d.array(x).size
    shape: list[int] = []
    rest = size
    while rest > 1 and len(shape) < 3 and d.random.random() < 0.8:
        shape.append(d.random.choice([n for n in range(1, rest + 1) if rest % n == 0]))
        rest //= shape[-1]
    shape.append(rest)
    if size and d.random.random() < 0.4:
        shape[d.random.randrange(len(shape))] = -1
    if not size and d.random.random() < 0.5:
        shape = [*d.shape(1), 0]
    d.note("reshape", (x, tuple(shape)))


@smooth
def transpose(d: Drawing) -> None:
    x = any_tensor(d)
    ndim = d.array(x).ndim
    axes = None if d.random.random() < 0.3 else tuple(d.random.sample(range(ndim), ndim))
    d.note("transpose", (x,), axes=axes)


@other
def swapaxes(d: Drawing) -> None:
    x = any_tensor(d, 1)
    ndim = d.array(x).ndim
    name = d.random.choice(("swapaxes", "moveaxis"))
    d.note(name, (x, axis_of(d, ndim), axis_of(d, ndim)))


@other
def dims_of_one(d: Drawing) -> None:
    x = any_tensor(d)
    array = d.array(x)
    if 1 in array.shape and d.random.random() < 0.6:
        ones = [dim for dim, n in enumerate(array.shape) if n == 1]
        d.note("squeeze", (x,), axis=d.random.choice((None, d.random.choice(ones))))
    else:
        d.note("expand_dims", (x, d.random.randint(-array.ndim - 1, array.ndim)))


@smooth
def broadcast_to(d: Drawing) -> None:
    x = any_tensor(d)
    shape = tuple(3 if n == 1 else n for n in d.array(x).shape)
    d.note("broadcast_to", (x, (2, *shape) if d.random.random() < 0.5 else shape))


@smooth
def joined(d: Drawing) -> None:
    x = any_float(d, 1)
    array = d.array(x)
    axis = axis_of(d, array.ndim)
    if d.random.random() < 0.3:
        d.note("stack", ([x, d.moved(x, d.ranks(x)), d.tensor(array.shape, ranks=d.ranks(x))],), axis=axis)
        return
    shape = list(array.shape)
    shape[axis] = d.random.choice(d.lengths)
    parts = [x, d.tensor(tuple(shape), ranks=d.ranks(x))]
    d.note("concatenate", (parts if d.random.random() < 0.5 else parts[::-1],), axis=axis)


@other
def parts(d: Drawing) -> None:
    x = any_tensor(d, 1)
    array = d.array(x)
    axis = axis_of(d, array.ndim)
    length = array.shape[axis]
    places = sorted(d.random.sample(range(length), min(length, d.random.randint(1, 2))))
    count = d.random.choice([n for n in range(1, length + 1) if length % n == 0] or [1])
    d.note("split", (x, d.random.choice((count, places))), axis=axis)


@smooth
def turned(d: Drawing) -> None:
    x = any_tensor(d, 1)
    axis = axis_of(d, d.array(x).ndim)
    if d.random.random() < 0.5:
        d.note("flip", (x,), axis=d.random.choice((None, axis)))
    else:
        d.note("roll", (x, d.random.randint(-3, 3)), axis=d.random.choice((None, axis)))


@other
def repeated(d: Drawing) -> None:
    x = any_tensor(d, 1)
    array = d.array(x)
    if d.random.random() < 0.5:
        d.note("repeat", (x, 2), axis=d.random.choice((None, axis_of(d, array.ndim))))
    else:
        d.note("tile", (x, d.random.choice((2, (1, 2), tuple(d.random.choice((1, 2)) for _ in array.shape)))))


@smooth
def pad(d: Drawing) -> None:
    x = any_tensor(d, 1)
    array = d.array(x)
    widths = tuple((d.random.choice((0, 0, 1)), d.random.choice((0, 0, 2))) for _ in array.shape)
    modes = ["constant"] * 2 + ["edge"] * (0 not in array.shape)
    d.note("pad", (x, widths), mode=d.random.choice(modes))


@other
def triangle(d: Drawing) -> None:
    x = any_float(d, 2)
    name = d.random.choice(("tril", "triu", "diagonal", "trace"))
    d.note(name, (x, d.random.randint(-1, 1)))


@smooth
def relaid(d: Drawing) -> None:
    x = any_tensor(d)
    ranks = d.ranks(x) if d.random.random() < 0.4 else d.random.choice(PLACEMENTS)
    d.note("to_global", (x, ranks, d.spec(ranks, d.array(x).ndim, d.array(x).dtype.name)))
