"""Python's operators on global tensors: `x + y` is `kf.ops.add(x, y)`, `x[2:5]` is `indexing.get(x, ...)`.

They are attached to `GlobalTensor` here, from one table, as the class itself is below everything that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from keras_flow.errors import FlowError
from keras_flow.tensors import indexing, ops, tape
from keras_flow.tensors.global_tensor import GlobalTensor

#: method `__name__` (and, swapped, `__rname__`) -> operator of `kf.ops`
_TWO_SIDED = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "mod",
    "pow": "power",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
#: comparisons; Python swaps these itself: `2 < x` is `x > 2`
_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
#: of one operand
_UNARY = {"neg": "negative", "abs": "absolute"}

_OPERANDS = (GlobalTensor, int, float, bool, complex, np.ndarray, np.generic)


def _binary(operator: ops.Operator, swapped: bool = False) -> Callable[[GlobalTensor, object], GlobalTensor]:
    def method(self: GlobalTensor, other: object) -> GlobalTensor:
        if not isinstance(other, _OPERANDS):
            return NotImplemented  # Python then asks the other operand, and raises TypeError where it cannot either
        return operator(other, self) if swapped else operator(self, other)

    return method


def _unary(operator: ops.Operator) -> Callable[[GlobalTensor], GlobalTensor]:
    def method(self: GlobalTensor) -> GlobalTensor:
        return operator(self)

    return method


def _iter(self: GlobalTensor) -> Iterator[GlobalTensor]:
    return (self[index] for index in range(len(self)))


def _contains(self: GlobalTensor, value: object) -> bool:
    return bool(ops.any(self == value))


def _pos(self: GlobalTensor) -> GlobalTensor:
    return self


def _invert(self: GlobalTensor) -> GlobalTensor:
    return ops.logical_not(self) if self.dtype == "bool" else ops.bitwise_invert(self)


def _round(self: GlobalTensor, digits: int | None = None) -> GlobalTensor:
    return ops.round(self, digits or 0)


def _transposed(self: GlobalTensor) -> GlobalTensor:
    """Dims in reverse order."""
    return ops.transpose(self)


def _setitem(self: GlobalTensor, key: object, value: object) -> None:
    if tape.watches([operand for operand in (self, value) if isinstance(operand, GlobalTensor)]):
        raise FlowError(
            "x[...] = value changes a tensor that kf.value_and_grad differentiates; make a new one, with "
            "kf.ops.where or kf.ops.concatenate"
        )
    result = indexing.put(self, key, value).to_global(sbp=self.sbp)
    self._shards = result._shards


def _attach() -> None:
    methods: dict[str, object] = {
        "__iter__": _iter,
        "__contains__": _contains,
        "__pos__": _pos,
        "__invert__": _invert,
        "__round__": _round,
        "__getitem__": indexing.get,
        "__setitem__": _setitem,
        "T": property(_transposed),
    }
    for method, name in (_TWO_SIDED | _COMPARISONS).items():
        methods[f"__{method}__"] = _binary(getattr(ops, name))
    # Python asks the right operand where the left one, a number or an array, does not know tensors
    for method, name in _TWO_SIDED.items():
        methods[f"__r{method}__"] = _binary(getattr(ops, name), swapped=True)
    for method, name in _UNARY.items():
        methods[f"__{method}__"] = _unary(getattr(ops, name))
    for method, function in methods.items():
        setattr(GlobalTensor, method, function)


_attach()
