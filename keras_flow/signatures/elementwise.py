"""Signatures of operators that act element by element, with numpy's broadcasting.

Any dim of the output may be split. P passes through an operator only where it is linear: `add` takes a partial sum in
both summands, `multiply` in one factor, `exp` in none.
"""

from __future__ import annotations

from collections.abc import Iterator

from keras_flow.sbp import Sbp
from keras_flow.signatures.call import OperatorCall, Signature
from keras_flow.signatures.registry import B, P, S, all_inputs_and_outputs, operators


def elementwise(call: OperatorCall) -> Iterator[Signature]:
    """Splits of each dim of the output; an input that is broadcast along it stays whole."""
    out = call.outputs[0]
    for dim in range(len(out)):
        parts: list[Sbp] = []
        for shape in call.inputs:
            own = dim - (len(out) - len(shape))
            parts.append(S(own) if own >= 0 and shape[own] == out[dim] else B)
        if any(part != B for part in parts):
            yield Signature(tuple(parts), (S(dim),) * len(call.outputs))


# fmt: off
operators(
    "abs", "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "ceil", "cos", "cosh",
    "erf", "erfinv", "exp", "exp2", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log10", "log1p",
    "log2", "logical_not", "reciprocal", "round", "rsqrt", "sign", "sigmoid", "log_sigmoid", "sin", "sinh",
    "sqrt", "square", "tan", "tanh", "trunc", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu",
    "silu", "swish", "softplus", "softsign", "hard_sigmoid", "hard_tanh", "hard_silu", "hard_swish",
    "tanh_shrink", "soft_shrink", "hard_shrink", "sparse_plus", "squareplus", "clip", "power", "mod",
    "floor_divide", "arctan2", "maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "zeros_like", "ones_like", "full_like", "nan_to_num", "binary_crossentropy",
)(elementwise)
# fmt: on


@operators("add", "subtract")
def _add(call: OperatorCall) -> Iterator[Signature]:
    yield from elementwise(call)
    if len(call.inputs) == 2:  # with a number it is affine
        yield Signature((P, P), (P,))


@operators("multiply")
def _multiply(call: OperatorCall) -> Iterator[Signature]:
    yield from elementwise(call)
    for index in range(len(call.inputs)):
        yield Signature(tuple(P if index == factor else B for factor in range(len(call.inputs))), (P,))


@operators("divide", "true_divide")
def _divide(call: OperatorCall) -> Iterator[Signature]:
    yield from elementwise(call)
    # parts divided by a zero of a tensor may be inf and nan (1/0 + 0/0), where the sum has inf
    if call.at("x1") == 0 and call.at("x2") is None and call.option("x2") != 0:
        yield Signature((P,), (P,))


@operators("negative", "real", "imag", "conj", "stop_gradient")
def _linear(call: OperatorCall) -> Iterator[Signature]:
    yield from elementwise(call)
    yield all_inputs_and_outputs(call, P)


@operators("cast")
def _cast(call: OperatorCall) -> Iterator[Signature]:
    yield from elementwise(call)
    yield all_inputs_and_outputs(call, P)  # the table leaves it out where the sum of converted parts is another


@operators("where")
def _where(call: OperatorCall) -> Iterator[Signature]:
    yield from elementwise(call)
    if len(call.inputs) == 3:
        yield Signature((B, P, P), (P,))
