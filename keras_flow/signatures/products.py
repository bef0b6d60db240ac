"""Signatures of products: `matmul`, `einsum`, attention, convolutions, and pooling, which has a convolution's dims.

In a product over named dims (`mk,kn->mn`) a split of a letter that the output has stays there (`S(0), B -> S(0)`); a
split of a letter that is summed gives a partial sum (`S(1), S(0) -> P`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_flow.signatures.call import OperatorCall, Shape, Signature
from keras_flow.signatures.registry import B, P, S, all_inputs_and_outputs, operators


@operators("matmul", "dot")
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


@operators("einsum")
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
    """The signatures of an einsum: a letter is split in all operands that have it; a letter that is summed gives P.

    A dim of length 1 that is broadcast against a longer one stays whole.

    Args:
        names: the letters of each operand, `["mk", "kn"]`.
        out: the letters of the output, `"mn"`.
        shapes: shape of each operand.
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
    # linear in each operand: a sum of one passes through while the others are the same everywhere
    for index in range(len(names)):
        yield Signature(tuple(P if index == operand else B for operand in range(len(names))), (P,))


@operators("dot_product_attention")
def _attention(call: OperatorCall) -> Iterator[Signature]:
    """Query, key, value [batch, length, heads, size]: rows and heads are independent of each other."""
    query, key, *more = call.inputs
    if all(len(shape) == 4 for shape in call.inputs) and not call.option("bias") and not call.option("mask"):
        extra = [name for name in call.names if name in ("bias", "mask")]
        if not extra:
            yield all_inputs_and_outputs(call, S(0))
            if query[2] == key[2]:
                yield all_inputs_and_outputs(call, S(2))
        else:  # [batch or 1, heads or 1, length, length]
            masks = more[1:]
            yield Signature((S(0), S(0), S(0), *[S(0) if mask[0] == query[0] else B for mask in masks]), (S(0),))
            if query[2] == key[2]:
                yield Signature((S(2), S(2), S(2), *[S(1) if mask[1] == query[2] else B for mask in masks]), (S(2),))


@operators("conv")
def _conv(call: OperatorCall) -> Iterator[Signature]:
    """x [batch, positions..., channels] and kernel [positions..., in, out]: rows, channels or groups are split."""
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


@operators("max_pool", "average_pool")
def _pool(call: OperatorCall) -> Iterator[Signature]:
    ndim = len(call.inputs[0])
    channel = 1 if call.option("data_format") == "channels_first" else ndim - 1
    yield all_inputs_and_outputs(call, S(0))
    yield all_inputs_and_outputs(call, S(channel))
    if call.name == "average_pool":
        yield all_inputs_and_outputs(call, P)
