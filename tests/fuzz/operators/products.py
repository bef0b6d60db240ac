"""Products, convolutions and attention."""

from __future__ import annotations

from tests.fuzz.drawing import Drawing
from tests.fuzz.operators.registry import any_float, other, smooth
from tests.fuzz.programs import PLACEMENTS


@other
def attention(d: Drawing) -> None:
    ranks = d.random.choice(PLACEMENTS)
    batch, length, keys, heads, size = (d.random.choice((1, 2, 3, 4)) for _ in range(5))
    query = d.tensor((batch, length, heads, size), ranks=ranks)
    key, value = (d.tensor((batch, keys, heads, size), ranks=ranks) for _ in range(2))
    given = {}
    if d.random.random() < 0.5:
        shape = (d.random.choice((1, batch)), d.random.choice((1, heads)), length, keys)
        given["bias"] = d.tensor(shape, ranks=ranks)
    d.note("dot_product_attention", (query, key, value), **given)


@other
def convolution(d: Drawing) -> None:
    ranks = d.random.choice(PLACEMENTS)
    channels, groups = d.random.choice(((1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2)))
    x = d.tensor((d.random.choice((0, 1, 2, 3, 4)), d.random.choice((4, 5)), channels), ranks=ranks)
    kernel = d.tensor((2, channels // groups, groups * d.random.choice((1, 2))), ranks=ranks)
    padding = d.random.choice(("valid", "same"))
    if d.random.random() < 0.5:
        d.note("conv", (x, kernel), strides=d.random.choice((1, 2)), padding=padding)
    else:
        d.note(d.random.choice(("max_pool", "average_pool")), (x, 2), strides=d.random.choice((1, 2)), padding=padding)


@smooth
def matmul(d: Drawing) -> None:
    x = any_float(d, 1)
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


@smooth
def einsum(d: Drawing) -> None:
    x = any_float(d, 1)
    shape = d.array(x).shape
    letters = "abcdef"[: len(shape)]
    lengths = dict(zip(letters, shape, strict=True)) | {"z": d.random.choice((1, 2, 3, 4))}
    second = d.random.sample(letters + "z", d.random.randint(1, len(letters) + 1))
    y = d.tensor(tuple(lengths[letter] for letter in second), ranks=d.ranks(x))
    union = sorted({*letters, *second})
    out = d.random.sample(union, d.random.randint(0, len(union)))
    d.note("einsum", (f"{letters},{''.join(second)}->{''.join(out)}", x, y))


@other
def outer(d: Drawing) -> None:
    x = any_float(d, 1)
    y = d.operand(x)
    shape = d.array(x).shape
    if d.array(y).shape == shape:
        d.note(d.random.choice(("vdot", "inner", "outer", "tensordot")), (x, y))
