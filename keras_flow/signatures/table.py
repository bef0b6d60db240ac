"""The table: for each operator the rows that hold on one placement axis, besides the one of all broadcast.

A row holds if the operator, run by each rank on its shards, gives the shards of the logical result. The rows follow
OneFlow's (`GetSbp` of its operators), with those of linear operators completed: P passes through whatever is linear in
an argument while the others are broadcast. `tests/tensors` checks each row by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from keras_flow.sbp import Sbp, Split, broadcast, partial_sum
from keras_flow.signatures.call import OperatorCall, Shape, Signature, dims_of

Rule = Callable[[OperatorCall], Iterator[Signature]]

B, P, S = broadcast, partial_sum, Split

RULES: dict[str, Rule] = {}


def rows_of(call: OperatorCall) -> list[Signature]:
    """The rows of a call on one axis, all broadcast last.

    A call that the table does not know has that row alone.
    """
    rule = RULES.get(call.name)
    rows = dict.fromkeys(rule(call) if rule else ())
    rows.setdefault(Signature((B,) * len(call.inputs), (B,) * len(call.outputs)))
    return list(rows)


def _of(*names: str) -> Callable[[Rule], Rule]:
    def note(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return note


def _same(call: OperatorCall, one: Sbp) -> Signature:
    return Signature((one,) * len(call.inputs), (one,) * len(call.outputs))


def _axes(call: OperatorCall, ndim: int, name: str = "axis", default: object = None) -> frozenset[int]:
    return dims_of(call.option(name, default), ndim)


# ---- element by element


def _aligned(call: OperatorCall) -> Iterator[Signature]:
    """Operators that act on elements, with numpy's broadcasting: each dim of the output may be split."""
    out = call.outputs[0]
    for dim in range(len(out)):
        parts = []
        for shape in call.inputs:
            own = dim - (len(out) - len(shape))
            parts.append(S(own) if own >= 0 and shape[own] == out[dim] else B)
        if any(part != B for part in parts):
            yield Signature(tuple(parts), (S(dim),) * len(call.outputs))


# fmt: off
_of(
    "abs", "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "ceil", "cos", "cosh",
    "erf", "erfinv", "exp", "exp2", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log10", "log1p",
    "log2", "logical_not", "reciprocal", "round", "rsqrt", "sign", "sigmoid", "log_sigmoid", "sin", "sinh",
    "sqrt", "square", "tan", "tanh", "trunc", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu",
    "silu", "swish", "softplus", "softsign", "hard_sigmoid", "hard_tanh", "hard_silu", "hard_swish",
    "tanh_shrink", "soft_shrink", "hard_shrink", "sparse_plus", "squareplus", "clip", "power", "mod",
    "floor_divide", "arctan2", "maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "zeros_like", "ones_like", "full_like", "nan_to_num", "binary_crossentropy",
)(_aligned)
# fmt: on


@_of("add", "subtract")
def _add(call: OperatorCall) -> Iterator[Signature]:
    yield from _aligned(call)
    if len(call.inputs) == 2:  # with a number it is affine
        yield Signature((P, P), (P,))


@_of("multiply")
def _multiply(call: OperatorCall) -> Iterator[Signature]:
    yield from _aligned(call)
    for index in range(len(call.inputs)):
        yield Signature(tuple(P if index == other else B for other in range(len(call.inputs))), (P,))


@_of("divide", "true_divide")
def _divide(call: OperatorCall) -> Iterator[Signature]:
    yield from _aligned(call)
    if call.at("x1") == 0:
        yield Signature((P, *[B] * (len(call.inputs) - 1)), (P,))


@_of("negative", "real", "imag", "conj")
def _linear(call: OperatorCall) -> Iterator[Signature]:
    yield from _aligned(call)
    yield _same(call, P)


@_of("cast")
def _cast(call: OperatorCall) -> Iterator[Signature]:
    yield from _aligned(call)
    if "float" in str(call.option("dtype")):  # a sum of rounded parts is not the rounded sum
        yield _same(call, P)


@_of("where")
def _where(call: OperatorCall) -> Iterator[Signature]:
    yield from _aligned(call)
    if len(call.inputs) == 3:
        yield Signature((B, P, P), (P,))


# ---- products


@_of("matmul", "dot")
def _matmul(call: OperatorCall) -> Iterator[Signature]:
    a, b = call.inputs
    if len(a) < 1 or len(b) < 1 or (call.name == "dot" and len(b) > 2):
        return
    batch = "abcdefgh"[: max(len(a), len(b)) - 2] if call.name == "matmul" else ""
    if call.name == "dot":
        left, right = "abcdefgh"[: len(a) - 1] + "k", "k" if len(b) == 1 else "kn"
        yield from contraction([left, right], left[:-1] + right[1:], call.inputs)
        return
    left = "k" if len(a) == 1 else batch[len(batch) - (len(a) - 2) :] + "mk"
    right = "k" if len(b) == 1 else batch[len(batch) - (len(b) - 2) :] + "kn"
    out = batch + ("m" if len(a) > 1 else "") + ("n" if len(b) > 1 else "")
    yield from contraction([left, right], out, call.inputs)


@_of("einsum")
def _einsum(call: OperatorCall) -> Iterator[Signature]:
    equation = str(call.option("subscripts")).replace(" ", "")
    if "..." in equation or "->" not in equation:
        return
    operands, out = equation.split("->")
    names = operands.split(",")
    if any(len(set(name)) < len(name) for name in names):
        return
    yield from contraction(names, out, call.inputs)


def contraction(names: Sequence[str], out: str, shapes: Sequence[Shape]) -> Iterator[Signature]:
    """A product over named dims: a letter is split in all operands that have it; a letter that is summed gives P.

    A dim of length 1 that is broadcast against a longer one stays whole.
    """
    lengths: dict[str, int] = {}
    for name, shape in zip(names, shapes, strict=True):
        for letter, length in zip(name, shape, strict=True):
            lengths[letter] = max(length, lengths.get(letter, 0))
    for letter in lengths:
        parts = tuple(
            S(name.index(letter)) if letter in name and shape[name.index(letter)] == lengths[letter] else B
            for name, shape in zip(names, shapes, strict=True)
        )
        yield Signature(parts, (S(out.index(letter)) if letter in out else P,))
    for index in range(len(names)):  # linear in each operand
        yield Signature(tuple(P if index == other else B for other in range(len(names))), (P,))


@_of("dot_product_attention")
def _attention(call: OperatorCall) -> Iterator[Signature]:
    """[batch, length, heads, size]: rows and heads are independent."""
    query, key, *more = call.inputs
    if all(len(shape) == 4 for shape in call.inputs) and not call.option("bias") and not call.option("mask"):
        extra = [name for name in call.names if name in ("bias", "mask")]
        if not extra:
            yield _same(call, S(0))
            if query[2] == key[2]:
                yield _same(call, S(2))
        else:  # [batch or 1, heads or 1, length, length]
            masks = more[1:]
            yield Signature((S(0), S(0), S(0), *[S(0) if mask[0] == query[0] else B for mask in masks]), (S(0),))
            if query[2] == key[2]:
                yield Signature((S(2), S(2), S(2), *[S(1) if mask[1] == query[2] else B for mask in masks]), (S(2),))


@_of("conv")
def _conv(call: OperatorCall) -> Iterator[Signature]:
    """Inputs [batch, positions..., channels] and kernels [positions..., in, out]: rows, channels, or groups of them."""
    x, kernel = call.inputs
    channel = 1 if call.option("data_format") == "channels_first" else len(x) - 1
    groups = x[channel] // kernel[-2]
    yield Signature((S(0), B), (S(0),))
    if groups > 1 and groups % call.ranks == 0:
        yield Signature((S(channel), S(len(kernel) - 1)), (S(channel),))
    if groups == 1:
        yield Signature((B, S(len(kernel) - 1)), (S(channel),))
        yield Signature((S(channel), S(len(kernel) - 2)), (P,))
    yield Signature((P, B), (P,))
    yield Signature((B, P), (P,))


@_of("max_pool", "average_pool")
def _pool(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    channel = 1 if call.option("data_format") == "channels_first" else ndim - 1
    yield _same(call, S(0))
    yield _same(call, S(channel))
    if call.name == "average_pool":
        yield _same(call, P)


# ---- reductions


def _kept(call: OperatorCall, ndim: int, reduced: frozenset[int]) -> Iterator[Signature]:
    for dim in range(ndim):
        if dim not in reduced:
            place = dim if call.option("keepdims") else dim - sum(other < dim for other in reduced)
            yield Signature((S(dim),), (S(place),))


@_of("max", "min", "amax", "amin", "prod", "any", "all", "var", "std", "logsumexp", "norm", "count_nonzero")
def _reduce(call: OperatorCall) -> Iterator[Signature]:
    yield from _kept(call, len(call.inputs[0]), _axes(call, len(call.inputs[0])))


@_of("sum")
def _sum(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    reduced = _axes(call, ndim)
    yield from _kept(call, ndim, reduced)
    yield from (Signature((S(dim),), (P,)) for dim in sorted(reduced))
    yield Signature((P,), (P,))


@_of("mean")
def _mean(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    yield from _kept(call, ndim, _axes(call, ndim))
    yield Signature((P,), (P,))


@_of("argmax", "argmin")
def _arg(call: OperatorCall) -> Iterator[Signature]:
    if call.option("axis") is not None:
        yield from _kept(call, len(call.inputs[0]), _axes(call, len(call.inputs[0])))


def _off_axis(call: OperatorCall, default: int) -> Iterator[Signature]:
    """Operators along one dim that keep the number of dims."""
    ndim = len(call.inputs[0])
    along = _axes(call, ndim, default=default)
    for dim in range(ndim):
        if dim not in along:
            yield _same(call, S(dim))


@_of("softmax", "log_softmax", "sort", "argsort", "layer_normalization", "rms_normalization", "normalize")
def _along_last(call: OperatorCall) -> Iterator[Signature]:
    for row in _off_axis(call, -1):
        yield Signature((row.inputs[0], *[B] * (len(call.inputs) - 1)), row.outputs)


@_of("cumsum")
def _cumsum(call: OperatorCall) -> Iterator[Signature]:
    if call.option("axis") is not None:
        yield from _off_axis(call, -1)
        yield _same(call, P)


@_of("cumprod")
def _cumprod(call: OperatorCall) -> Iterator[Signature]:
    if call.option("axis") is not None:
        yield from _off_axis(call, -1)


@_of("top_k")
def _top_k(call: OperatorCall) -> Iterator[Signature]:
    for dim in range(len(call.inputs[0]) - 1):
        yield _same(call, S(dim))


@_of("categorical_crossentropy", "sparse_categorical_crossentropy")
def _crossentropy(call: OperatorCall) -> Iterator[Signature]:
    """Classes may be any dim; class numbers (sparse) have the dims of the result."""
    output = call.inputs[-1]
    along = _axes(call, len(output), default=-1)
    for place, dim in enumerate(dim for dim in range(len(output)) if dim not in along):
        target = S(place if call.name.startswith("sparse") else dim)
        yield Signature((target, S(dim))[-len(call.inputs) :], (S(place),))


# ---- shapes


@_of("reshape")
def _reshape(call: OperatorCall) -> Iterator[Signature]:
    """A split stays with the first dim of each group of dims that are joined or cut (OneFlow's rule).

    Where lengths change both must divide, so that the local shapes are those of the layouts on every rank.
    """
    yield Signature((P,), (P,))
    shape, target = call.inputs[0], call.outputs[0]
    for before, after in _groups(shape, target):
        if shape[before] == target[after] or not (shape[before] % call.ranks or target[after] % call.ranks):
            yield Signature((S(before),), (S(after),))


def _groups(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """First dims of the shortest groups of dims whose products agree, from the left; dims of length 1 carry nothing."""
    left = [dim for dim, length in enumerate(before) if length != 1]
    right = [dim for dim, length in enumerate(after) if length != 1]
    if 0 in before:
        return
    i = j = 0
    while i < len(left) and j < len(right):
        first, second = left[i], right[j]
        product, other = before[first], after[second]
        while product != other:
            if product < other:
                i += 1
                product *= before[left[i]]
            else:
                j += 1
                other *= after[right[j]]
        yield first, second
        i, j = i + 1, j + 1


@_of("transpose")
def _transpose(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    order = call.option("axes") or tuple(reversed(range(ndim)))
    for place, dim in enumerate(order):
        yield Signature((S(dim % ndim),), (S(place),))
    yield Signature((P,), (P,))


@_of("swapaxes")
def _swapaxes(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    one, other = (int(call.option(name)) % ndim for name in ("axis1", "axis2"))
    for dim in range(ndim):
        yield Signature((S(dim),), (S({one: other, other: one}.get(dim, dim)),))
    yield Signature((P,), (P,))


@_of("expand_dims")
def _expand_dims(call: OperatorCall) -> Iterator[Signature]:
    new = _axes(call, len(call.outputs[0]))
    places = [place for place in range(len(call.outputs[0])) if place not in new]
    yield from (Signature((S(dim),), (S(place),)) for dim, place in enumerate(places))
    yield Signature((P,), (P,))


@_of("squeeze")
def _squeeze(call: OperatorCall) -> Iterator[Signature]:
    shape = call.inputs[0]
    gone = [dim for dim, n in enumerate(shape) if n == 1] if call.option("axis") is None else _axes(call, len(shape))
    places = [dim for dim in range(len(shape)) if dim not in gone]
    yield from (Signature((S(dim),), (S(place),)) for place, dim in enumerate(places))
    yield Signature((P,), (P,))


@_of("broadcast_to")
def _broadcast_to(call: OperatorCall) -> Iterator[Signature]:
    before, after = call.inputs[0], call.outputs[0]
    first = len(after) - len(before)
    for dim in range(len(after)):
        stretched = dim < first or before[dim - first] != after[dim]
        yield Signature((B if stretched else S(dim - first),), (S(dim),))
    yield Signature((P,), (P,))


@_of("concatenate")
def _concatenate(call: OperatorCall) -> Iterator[Signature]:
    yield from _off_axis(call, -1)
    yield _same(call, P)


@_of("stack")
def _stack(call: OperatorCall) -> Iterator[Signature]:
    new = next(iter(_axes(call, len(call.outputs[0]), default=0)))
    for dim in range(len(call.inputs[0])):
        yield Signature((S(dim),) * len(call.inputs), (S(dim if dim < new else dim + 1),))
    yield _same(call, P)


@_of("split", "array_split", "roll", "flip")
def _along(call: OperatorCall) -> Iterator[Signature]:
    yield from _off_axis(call, 0 if call.name != "flip" else -1) if call.option("axis") is not None else ()
    yield _same(call, P)


@_of("repeat", "tile")
def _repeat(call: OperatorCall) -> Iterator[Signature]:
    before, after = call.inputs[0], call.outputs[0]
    first = len(after) - len(before)
    if call.name == "tile" or call.option("axis") is not None:
        for dim, length in enumerate(before):
            if after[dim + first] == length:
                yield Signature((S(dim),), (S(dim + first),))
    yield Signature((P,), (P,))


@_of("pad")
def _pad(call: OperatorCall) -> Iterator[Signature]:
    for dim, (before, after) in enumerate(zip(call.inputs[0], call.outputs[0], strict=True)):
        if before == after:
            yield _same(call, S(dim))
    if call.option("mode", "constant") == "constant" and not call.option("constant_values"):
        yield _same(call, P)


@_of("getitem")
def _getitem(call: OperatorCall) -> Iterator[Signature]:
    """Indices of numpy's basic kind, one entry for each dim: a slice, or a number that removes the dim.

    A dim that is taken whole stays split. One that is cut gives P: each rank has its part of the result and zeros.
    """
    place = 0
    for dim, (entry, length) in enumerate(zip(call.option("key"), call.inputs[0], strict=True)):
        whole = isinstance(entry, slice) and range(*entry.indices(length)) == range(length)
        yield Signature((S(dim),), (S(place) if whole else P,))
        place += isinstance(entry, slice)
    yield Signature((P,), (P,))


@_of("setitem")
def _setitem(call: OperatorCall) -> Iterator[Signature]:
    """`getitem`'s places, written: whole dims stay split in both; where a dim is cut, the values are whole."""
    target, _ = call.inputs
    place = 0
    for dim, (entry, length) in enumerate(zip(call.option("key"), target, strict=True)):
        whole = isinstance(entry, slice) and range(*entry.indices(length)) == range(length)
        yield Signature((S(dim), S(place) if whole else B), (S(dim),))
        place += isinstance(entry, slice)
    yield Signature((P, P), (P,))


# ---- rows chosen by numbers


@_of("take")
def _take(call: OperatorCall) -> Iterator[Signature]:
    """[..., axis, ...] by indices of any shape: a table split along the axis gives zeros for rows that others hold."""
    table, *chosen = call.inputs  # indices may be one number
    whole, ndim = (B,) * len(chosen), len(chosen[0]) if chosen else 0
    yield Signature((P, *whole), (P,))
    if call.option("axis") is None:
        return
    axis = int(call.option("axis")) % len(table)
    yield from (Signature((B, S(dim)), (S(axis + dim),)) for dim in range(ndim))
    for dim in range(len(table)):
        if dim != axis:
            yield Signature((S(dim), *whole), (S(dim if dim < axis else dim + ndim - 1),))
    yield Signature((S(axis), *whole), (P,))


@_of("take_along_axis")
def _take_along_axis(call: OperatorCall) -> Iterator[Signature]:
    x, indices = call.inputs
    if call.option("axis", -1) is None or len(x) != len(indices):
        return
    along = _axes(call, len(x), default=-1)
    for dim in range(len(x)):
        if dim not in along and x[dim] == indices[dim]:
            yield _same(call, S(dim))
    yield Signature((P, B), (P,))


@_of("one_hot")
def _one_hot(call: OperatorCall) -> Iterator[Signature]:
    new = next(iter(_axes(call, len(call.outputs[0]), default=-1)))
    for dim in range(len(call.inputs[0])):
        yield Signature((S(dim),), (S(dim if dim < new else dim + 1),))
    yield Signature((B,), (S(new),))


@_of("batch_normalization")
def _batch_normalization(call: OperatorCall) -> Iterator[Signature]:
    """x [..., c, ...] and vectors [c]."""
    channel = next(iter(_axes(call, len(call.inputs[0]))))
    vectors = len(call.inputs) - 1
    for dim in range(len(call.inputs[0])):
        yield Signature((S(dim), *[S(0) if dim == channel else B] * vectors), (S(dim),))
