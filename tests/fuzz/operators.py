"""The operators that random programs call, each with random arguments that it may be given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.drawing import Drawing
from tests.fuzz.programs import PLACEMENTS, Ref

#: draw one step, or nothing where no tensor of the program fits
Draw = Callable[[Drawing], Any]
SMOOTH: list[Draw] = []
OTHERS: list[Draw] = []


def _smooth(draw: Draw) -> Draw:
    SMOOTH.append(draw)
    return draw


def _other(draw: Draw) -> Draw:
    OTHERS.append(draw)
    return draw


def _float(d: Drawing, least: int = 0, nonempty: bool = False) -> Ref:
    chosen = d.any_of(lambda a: a.dtype == "float32" and a.ndim >= least and (a.size > 0 or not nonempty))
    return chosen or d.tensor(tuple(max(n, 1) for n in d.shape(max(least, 2))))


def _any(d: Drawing, least: int = 0) -> Ref:
    return d.any_of(lambda a: a.ndim >= least) or d.tensor(d.shape(max(least, 1)))


def _axis(d: Drawing, ndim: int) -> int:
    return d.random.randrange(-ndim, ndim)


def _axes(d: Drawing, ndim: int) -> Any:
    """None, one dim, or several."""
    kind = d.random.random()
    if kind < 0.2 or not ndim:
        return None
    if kind < 0.7:
        return _axis(d, ndim)
    return tuple(d.random.sample(range(ndim), d.random.randint(1, ndim)))


def _apart(array: np.ndarray) -> bool:
    """Whether rounding cannot change the order of elements."""
    return array.dtype != "float32" or array.size < 2 or bool(np.diff(np.sort(array.ravel())).min() > 1e-3)


# ---- element by element


@_smooth
def unary(d: Drawing) -> None:
    x = _float(d)
    names = ["sin", "cos", "tanh", "sigmoid", "negative", "square", "softplus", "gelu", "silu", "relu", "absolute"]
    array = d.array(x)
    if array.size and array.min() > 0.3:
        names += ["log", "sqrt", "rsqrt", "reciprocal"] * 3
    if array.size and array.max() < 4:
        names += ["exp"]
    d.note(d.random.choice(names), (x,))


@_smooth
def binary(d: Drawing) -> None:
    x = _float(d)
    y = d.operand(x)
    name = d.random.choice(("operator.add", "operator.sub", "operator.mul", "add", "multiply", "maximum", "minimum"))
    d.note(name, (x, y) if d.random.random() < 0.5 else (y, x))


@_smooth
def with_number(d: Drawing) -> None:
    x = _float(d)
    number = d.random.choice((2, -1, 0.5, 3.25, np.float32(1.5), np.int32(2)))
    name = d.random.choice(("add", "sub", "mul", "truediv"))
    d.note(f"operator.{name}", (number, x) if name != "truediv" and d.random.random() < 0.5 else (x, number))


@_other
def with_array(d: Drawing) -> None:
    x = _any(d)
    array = d.array(x)
    given = np.linspace(-1, 2, array.size, dtype="float32").reshape(array.shape)
    name = d.random.choice(("add", "sub", "mul"))
    d.note(f"operator.{name}", (x, given) if d.random.random() < 0.5 else (given, x))


@_smooth
def divide(d: Drawing) -> None:
    x = _float(d)
    far = d.any_of(
        lambda a: a.dtype == "float32" and a.shape in (d.array(x).shape, ()) and a.size > 0 and abs(a).min() > 0.2
    )
    if far is not None:
        d.note(d.random.choice(("divide", "operator.truediv")), (x, d.moved(far, d.ranks(x))))


@_other
def whole_numbers(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype == "int32") or d.tensor(d.shape(2), "int32")
    name = d.random.choice(
        ("operator.add", "operator.mul", "operator.floordiv", "operator.mod", "operator.eq", "maximum")
    )
    number = d.random.choice((1, 2, 3))
    d.note(name, (x, number if "div" in name or "mod" in name else d.operand(x, "int32")))


@_other
def conditions(d: Drawing) -> None:
    x = _any(d)
    if d.array(x).dtype == "bool":
        y = d.operand(x, "bool")
        d.note(d.random.choice(("logical_and", "logical_or", "logical_xor", "operator.and_", "operator.or_")), (x, y))
    else:
        d.note(d.random.choice(("operator.lt", "operator.ge", "not_equal")), (x, 0.123))


@_other
def not_(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype == "bool") or d.tensor(d.shape(2), "bool")
    d.note("logical_not", (x,))


@_smooth
def where(d: Drawing) -> None:
    x = _float(d)
    condition = d.operand(x, "bool")
    y = d.operand(x) if d.random.random() < 0.7 else 0.0
    d.note("where", (condition, x, y) if d.random.random() < 0.5 else (condition, y, x))


@_other
def cast(d: Drawing) -> None:
    x = _any(d)
    names = ["float32", "bool"] if d.array(x).dtype != "float32" else ["float32"]
    d.note("cast", (x, d.random.choice(names + ["int32"] * (d.array(x).dtype == "bool"))))


@_other
def clip(d: Drawing) -> None:
    d.note("clip", (_float(d), -0.5, d.random.choice((0.5, 2))))


# ---- reductions and statistics


@_smooth
def reduction(d: Drawing) -> None:
    x = _float(d)
    name = d.random.choice(("sum", "sum", "mean", "max", "min", "logsumexp", "var", "prod"))
    if d.array(x).size == 0 and name in ("mean", "var", "logsumexp"):
        return
    d.note(name, (x,), axis=_axes(d, d.array(x).ndim), keepdims=d.random.random() < 0.4)


@_other
def reduction_of_any(d: Drawing) -> None:
    x = _any(d)
    array = d.array(x)
    if array.dtype == "float32":
        d.note("count_nonzero", (d.note("operator.ge", (x, 0.321)),), axis=_axes(d, array.ndim))
        return
    names = (
        ("sum", "any", "all", "count_nonzero", "max", "min", "prod") if array.dtype != "bool" else ("sum", "any", "all")
    )
    name = d.random.choice(names)
    d.note(name, (x,), axis=_axes(d, array.ndim))


@_other
def place_of_extreme(d: Drawing) -> None:
    x = d.any_of(lambda a: a.ndim > 0 and a.dtype != "bool" and _apart(a)) or d.tensor(d.shape(2))
    axis = None if d.random.random() < 0.2 else _axis(d, d.array(x).ndim)
    d.note(d.random.choice(("argmax", "argmin")), (x,), axis=axis, keepdims=d.random.random() < 0.3)


@_other
def norm(d: Drawing) -> None:
    x = _float(d, 1, nonempty=True)
    order = d.random.choice((None, 1, 2, math.inf))
    axis = _axis(d, d.array(x).ndim)
    d.note("norm", (x,), ord=order, axis=axis, keepdims=d.random.random() < 0.5)


@_smooth
def softmax(d: Drawing) -> None:
    x = _float(d, 1, nonempty=True)
    name = d.random.choice(("softmax", "log_softmax"))
    d.note(name, (x,), axis=d.random.choice((-1, _axis(d, d.array(x).ndim))))


@_other
def normalization(d: Drawing) -> None:
    x = _float(d, 1, nonempty=True)
    name = d.random.choice(("rms_normalization", "layer_normalization"))
    d.note(name, (x,), axis=_axis(d, d.array(x).ndim), epsilon=0.5)


@_smooth
def cumulative(d: Drawing) -> None:
    x = _float(d, 1)
    d.note("cumsum", (x,), axis=d.random.choice((None, _axis(d, d.array(x).ndim))))


@_other
def cumulative_product(d: Drawing) -> None:
    x = _float(d, 1)
    d.note("cumprod", (x,), axis=d.random.choice((None, _axis(d, d.array(x).ndim))))


@_smooth
def sort(d: Drawing) -> None:
    x = _float(d, 1)
    d.note("sort", (x,), axis=_axis(d, d.array(x).ndim))


@_other
def order(d: Drawing) -> None:
    x = d.any_of(lambda a: a.ndim > 0 and a.dtype == "float32" and _apart(a)) or d.tensor(d.shape(2))
    d.note("argsort", (x,), axis=_axis(d, d.array(x).ndim))


@_other
def top_k(d: Drawing) -> None:
    x = d.any_of(lambda a: a.ndim > 0 and a.dtype == "float32" and _apart(a) and a.shape[-1] > 0)
    if x is not None:
        d.note("top_k", (x, d.random.randint(1, d.array(x).shape[-1])))


# ---- products


@_smooth
def matmul(d: Drawing) -> None:
    x = _float(d, 1)
    shape = d.array(x).shape
    new = d.random.choice(d.lengths)
    batch = shape[:-2] if d.random.random() < 0.3 else ()
    kind = d.random.random()
    if kind < 0.2:
        other = d.tensor(shape[-1:], ranks=d.ranks(x))
    elif kind < 0.8 or len(shape) == 1:
        other = d.tensor((*batch, shape[-1], new), ranks=d.ranks(x))
    else:  # the other on the left
        other = d.tensor((*batch, new, shape[-2]), ranks=d.ranks(x))
        d.note("matmul", (other, x))
        return
    name = d.random.choice(("matmul", "operator.matmul"))
    d.note("dot" if other is not None and not batch and d.random.random() < 0.2 else name, (x, other))


@_smooth
def einsum(d: Drawing) -> None:
    x = _float(d, 1)
    shape = d.array(x).shape
    letters = "abcdef"[: len(shape)]
    lengths = dict(zip(letters, shape, strict=True)) | {"z": d.random.choice((1, 2, 3, 4))}
    second = d.random.sample(letters + "z", d.random.randint(1, len(letters) + 1))
    y = d.tensor(tuple(lengths[letter] for letter in second), ranks=d.ranks(x))
    union = sorted({*letters, *second})
    out = d.random.sample(union, d.random.randint(0, len(union)))
    d.note("einsum", (f"{letters},{''.join(second)}->{''.join(out)}", x, y))


@_other
def outer(d: Drawing) -> None:
    x = _float(d, 1)
    y = d.operand(x)
    shape = d.array(x).shape
    if d.array(y).shape == shape:
        d.note(d.random.choice(("vdot", "inner", "outer", "tensordot")), (x, y))


# ---- shapes


@_smooth
def reshape(d: Drawing) -> None:
    x = _any(d)
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


@_smooth
def transpose(d: Drawing) -> None:
    x = _any(d)
    ndim = d.array(x).ndim
    axes = None if d.random.random() < 0.3 else tuple(d.random.sample(range(ndim), ndim))
    d.note("transpose", (x,), axes=axes)


@_other
def swapaxes(d: Drawing) -> None:
    x = _any(d, 1)
    ndim = d.array(x).ndim
    name = d.random.choice(("swapaxes", "moveaxis"))
    d.note(name, (x, _axis(d, ndim), _axis(d, ndim)))


@_other
def dims_of_one(d: Drawing) -> None:
    x = _any(d)
    array = d.array(x)
    if 1 in array.shape and d.random.random() < 0.6:
        ones = [dim for dim, n in enumerate(array.shape) if n == 1]
        d.note("squeeze", (x,), axis=d.random.choice((None, d.random.choice(ones))))
    else:
        d.note("expand_dims", (x, d.random.randint(-array.ndim - 1, array.ndim)))


@_smooth
def broadcast_to(d: Drawing) -> None:
    x = _any(d)
    shape = tuple(3 if n == 1 else n for n in d.array(x).shape)
    d.note("broadcast_to", (x, (2, *shape) if d.random.random() < 0.5 else shape))


@_smooth
def joined(d: Drawing) -> None:
    x = _float(d, 1)
    array = d.array(x)
    axis = _axis(d, array.ndim)
    if d.random.random() < 0.3:
        d.note("stack", ([x, d.moved(x, d.ranks(x)), d.tensor(array.shape, ranks=d.ranks(x))],), axis=axis)
        return
    shape = list(array.shape)
    shape[axis] = d.random.choice(d.lengths)
    parts = [x, d.tensor(tuple(shape), ranks=d.ranks(x))]
    d.note("concatenate", (parts if d.random.random() < 0.5 else parts[::-1],), axis=axis)


@_other
def parts(d: Drawing) -> None:
    x = _any(d, 1)
    array = d.array(x)
    axis = _axis(d, array.ndim)
    length = array.shape[axis]
    places = sorted(d.random.sample(range(length), min(length, d.random.randint(1, 2))))
    count = d.random.choice([n for n in range(1, length + 1) if length % n == 0] or [1])
    d.note("split", (x, d.random.choice((count, places))), axis=axis)


@_smooth
def turned(d: Drawing) -> None:
    x = _any(d, 1)
    axis = _axis(d, d.array(x).ndim)
    if d.random.random() < 0.5:
        d.note("flip", (x,), axis=d.random.choice((None, axis)))
    else:
        d.note("roll", (x, d.random.randint(-3, 3)), axis=d.random.choice((None, axis)))


@_other
def repeated(d: Drawing) -> None:
    x = _any(d, 1)
    array = d.array(x)
    if d.random.random() < 0.5:
        d.note("repeat", (x, 2), axis=d.random.choice((None, _axis(d, array.ndim))))
    else:
        d.note("tile", (x, d.random.choice((2, (1, 2), tuple(d.random.choice((1, 2)) for _ in array.shape)))))


@_smooth
def pad(d: Drawing) -> None:
    x = _any(d, 1)
    array = d.array(x)
    widths = tuple((d.random.choice((0, 0, 1)), d.random.choice((0, 0, 2))) for _ in array.shape)
    modes = ["constant"] * 2 + ["edge"] * (0 not in array.shape)
    d.note("pad", (x, widths), mode=d.random.choice(modes))


@_other
def triangle(d: Drawing) -> None:
    x = _float(d, 2)
    name = d.random.choice(("tril", "triu", "diagonal", "trace"))
    d.note(name, (x, d.random.randint(-1, 1)))


# ---- places


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


@_smooth
def getitem(d: Drawing) -> None:
    x = _any(d, 1)
    d.note("operator.getitem", (x, _key(d, d.array(x).shape, True)))


@_other
def setitem(d: Drawing) -> None:
    x = _float(d, 1)
    array = d.array(x)
    key = _key(d, array.shape, False)
    shape = array[key].shape
    if d.random.random() < 0.5:
        d.note("setitem", (x, key, 0.75))
    else:
        value = d.tensor(tuple(1 if d.random.random() < 0.2 else n for n in shape), ranks=d.ranks(x))
        d.note("setitem", (x, key, value))


@_other
def scattered(d: Drawing) -> None:
    x = _float(d, 1, nonempty=True)
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


@_smooth
def take(d: Drawing) -> None:
    x = _any(d, 1)
    array = d.array(x)
    axis = _axis(d, array.ndim)
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


@_other
def take_along_axis(d: Drawing) -> None:
    x = _float(d, 1)
    array = d.array(x)
    axis = _axis(d, array.ndim)
    if not array.shape[axis]:
        return
    shape = list(array.shape)
    shape[axis] = d.random.choice((1, 2, 3))
    wrapped = d.note("operator.mod", (d.tensor(tuple(shape), "int32", d.ranks(x)), array.shape[axis]))
    if wrapped is not None:
        d.note("take_along_axis", (x, wrapped), axis=axis)


@_other
def one_hot(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype == "int32") or d.tensor(d.shape(1), "int32")
    d.note("one_hot", (x, d.random.choice((3, 5, 8))), axis=d.random.choice((-1, _axis(d, d.array(x).ndim + 1))))


# ---- layouts


@_smooth
def relaid(d: Drawing) -> None:
    x = _any(d)
    ranks = d.ranks(x) if d.random.random() < 0.4 else d.random.choice(PLACEMENTS)
    d.note("to_global", (x, ranks, d.spec(ranks, d.array(x).ndim, d.array(x).dtype.name)))
