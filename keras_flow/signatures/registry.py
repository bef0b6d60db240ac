"""The registry of the signatures of operators, and what most functions that state them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keras_flow.sbp import Sbp, Split, broadcast, partial_sum
from keras_flow.signatures.call import OperatorCall, Signature, dims_of

SignatureFunction = Callable[[OperatorCall], Iterator[Signature]]

B, P, S = broadcast, partial_sum, Split

#: name in `keras.ops` -> the function that yields the operator's signatures on one axis
SIGNATURE_FUNCTIONS: dict[str, SignatureFunction] = {}


def operators(*names: str) -> Callable[[SignatureFunction], SignatureFunction]:
    """Decorator: the function states the signatures of the operators of these names."""

    def register(function: SignatureFunction) -> SignatureFunction:
        for name in names:
            SIGNATURE_FUNCTIONS[name] = function
        return function

    return register


def all_inputs_and_outputs(call: OperatorCall, part: Sbp) -> Signature:
    """The signature in which every input and output has the same sbp."""
    return Signature((part,) * len(call.inputs), (part,) * len(call.outputs))


def axes_of(call: OperatorCall, ndim: int, default: object = None) -> frozenset[int]:
    """The dims that the argument `axis` of the call names; `default` where it is not given."""
    return dims_of(call.option("axis", default), ndim)


def off_axis(call: OperatorCall, default: int) -> Iterator[Signature]:
    """Splits of every dim but that along which the operator works; for operators that keep the number of dims."""
    ndim = len(call.inputs[0])
    along = axes_of(call, ndim, default=default)
    for dim in range(ndim):
        if dim not in along:
            yield all_inputs_and_outputs(call, S(dim))
