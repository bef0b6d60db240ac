"""Numbers on PyTorch of which each rank holds its part, summed over the ranks when something asks for them.

A loss, and what a batch adds to the state of metrics, are sums over rows. Each rank has the sum over its own rows (SBP:
P). The loss need not be known for its gradient, nor a metric before it is read: so nothing is sent for them in the
forward pass, and what waits travels together, in the message of the last gradients or in one of its own.

Example: losses 1 and 2 on rank 0, 3 on rank 1; their mean is `PartialNumber` 1.0 on rank 0 and 1.0 on rank 1 (each
divided by 3). `mean * 4` has the parts 4.0 and 4.0; `float(mean)` sums, 2.0 on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_distributed

from keras_flow.backends.torch.rows import split_rows
from keras_flow.backends.torch.rows.split_rows import DeferredTensor
from keras_flow.backends.torch.step import OwnRows

if TYPE_CHECKING:
    import keras

_aten = torch.ops.aten
#: of a number: linear, and the result shares no memory with it
_LINEAR = (_aten.clone, _aten.sum, _aten.neg)
#: of a number and another that is equal on all ranks
_SCALES = (_aten.mul, _aten.div)
_LIKE = (_aten.ones_like, _aten.zeros_like, _aten.empty_like, _aten.full_like)


class PartialNumber(DeferredTensor):
    """A number that is the sum of what the ranks hold.

    Attributes:
        own: this rank's part, without a gradient; None once the program has written into the number.
        rows: the rows that it is of.
    """

    own: torch.Tensor | None
    rows: OwnRows
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, own: torch.Tensor, rows: OwnRows) -> PartialNumber:
        """A tensor without dims or memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, (), dtype=own.dtype, device=own.device)

    def __init__(self, own: torch.Tensor, rows: OwnRows) -> None:
        self.own, self.rows, self._whole = own, rows, None

    def whole(self) -> torch.Tensor:
        """The sum, without a gradient. A collective of the ranks that hold parts, the first time."""
        if self._whole is None:
            assert self.own is not None
            self._whole = split_rows.summed(self.own.clone(), self.rows.groups)
        return self._whole

    @classmethod
    def apart(
        cls, operator: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object | None:
        """The operator on the parts, where it is linear in them."""
        return _in_parts(operator, args, kwargs)

    def given(self, shares: bool, writes: bool) -> torch.Tensor:
        """The sum, which counts from here on where it is written into, now or by a view."""
        value = self.whole()
        if shares:
            self.own = None
        return value


def partial_number(own: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """The number of which `own` is this rank's part; its gradient is that of `split_rows.total`."""
    return _FromPart.apply(own, rows) if torch.is_grad_enabled() and own.requires_grad else PartialNumber(own, rows)


def _in_parts(operator: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object | None:
    """Apply an operator to the parts, where it is linear in them; otherwise return None."""
    kind = operator.overloadpacket
    numbers = [leaf for leaf in args if isinstance(leaf, PartialNumber)]
    if not numbers or any(number.own is None for number in numbers):
        return None
    first, own = numbers[0], tuple(leaf.own if isinstance(leaf, PartialNumber) else leaf for leaf in args)
    if kind in _LIKE:
        return operator(*own, **kwargs)
    if kind in _LINEAR:
        linear = True
    elif kind is _aten._to_copy:
        # a narrower dtype would round each part
        to = kwargs.get("dtype") or first.dtype
        linear = to.is_floating_point and to.itemsize >= first.dtype.itemsize  # type: ignore[attr-defined]
    elif kind in _SCALES:
        scale = args[1] if args[0] is first else args[0]
        linear = len(args) == 2 and not kwargs and len(numbers) == 1 and not getattr(scale, "ndim", 0)
        # 1 / loss is not linear in it
        linear = linear and (kind is _aten.mul or args[0] is first)
    elif kind is _aten.add:
        # Python's `sum` begins with the number 0
        others = [leaf for leaf in args if not isinstance(leaf, PartialNumber)]
        linear = not kwargs and all(not isinstance(leaf, torch.Tensor) and leaf == 0 for leaf in others)
        linear = linear and all(number.rows == first.rows for number in numbers)
    else:
        linear = False
    return PartialNumber(operator(*own, **kwargs), first.rows) if linear else None


class _FromPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, rows):
        ctx.count = rows.count
        return PartialNumber(own.detach(), rows)

    @staticmethod
    def backward(ctx, grad):
        # as `split_rows.total`: all ranks compute the same from the sum
        return grad * ctx.count, None


class UnsettledState(DeferredTensor):
    """The tensor of a variable while additions to it wait: any operator on it sums them first.

    Attributes:
        before: the variable's own tensor.
    """

    before: torch.Tensor
    is_returned = False

    @staticmethod
    def __new__(cls, before: torch.Tensor) -> UnsettledState:
        """A tensor without memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, before.shape, dtype=before.dtype, device=before.device)

    def __init__(self, before: torch.Tensor) -> None:
        self.before = before

    def whole(self) -> torch.Tensor:
        """The variable's own tensor, with all additions. A collective where some wait."""
        settle()
        return self.before


@dataclass
class Addition:
    """The sum of what this rank's rows add to a variable that is equal on all ranks.

    Attributes:
        variable: the variable, which holds an `UnsettledState` meanwhile.
        before: its own tensor.
        value: the sum of what was added since.
        groups: the process groups over which the additions of all ranks are summed, one after the other.
    """

    variable: keras.Variable
    before: torch.Tensor
    value: torch.Tensor
    groups: tuple[torch_distributed.ProcessGroup, ...]

    def finish(self, total: torch.Tensor) -> None:
        """Add the sum of all ranks."""
        with torch.no_grad():
            self.before.add_(total.view(self.before.shape))


#: id of a variable -> what waits to be added to it; in the same order on all ranks
_waiting: dict[int, Addition] = {}


def add_later(variable: keras.Variable, value: torch.Tensor, rows: OwnRows) -> None:
    """Add to a variable the sum over all ranks of `value`, when it is read at the latest. No communication."""
    value = value.detach()
    known = _waiting.get(id(variable))
    if known is not None and known.groups != rows.groups:
        settle()
        known = None
    if known is not None:
        known.value = known.value + value
        return
    before: torch.Tensor = variable._value
    value = value.to(before.dtype)
    _waiting[id(variable)] = Addition(variable, before, value, rows.groups)
    variable._value = UnsettledState(before)


def before(variable: keras.Variable) -> torch.Tensor:
    """A variable's own tensor, without what waits to be added to it."""
    value: torch.Tensor = variable._value
    return value.before if isinstance(value, UnsettledState) else value


def settle() -> None:
    """Sum what waits: one all-reduce for each dtype. A collective of the ranks, unless nothing waits."""
    together: dict[tuple[object, ...], list[Addition]] = {}
    for addition in take():
        together.setdefault((addition.groups, addition.value.dtype), []).append(addition)
    for (groups, _), additions in together.items():
        flat = torch.cat([addition.value.reshape(-1) for addition in additions])
        finish(additions, split_rows.summed(flat, groups))  # type: ignore[arg-type]


def take(group: torch_distributed.ProcessGroup | None = None, dtype: torch.dtype | None = None) -> list[Addition]:
    """Take what waits, all or of one group and dtype, for a message of the caller's; then call `finish`."""
    taken = [
        addition
        for addition in _waiting.values()
        if group is None or (addition.groups == (group,) and addition.value.dtype == dtype)
    ]
    for addition in taken:
        del _waiting[id(addition.variable)]
        # whatever it was assigned meanwhile has settled it, so it is still the placeholder
        addition.variable._value = addition.before
    return taken


def finish(additions: Sequence[Addition], flat: torch.Tensor) -> None:
    """Add the sums over the ranks, which lie one after the other in `flat`."""
    pieces = flat.split([addition.value.numel() for addition in additions])
    for addition, piece in zip(additions, pieces, strict=True):
        addition.finish(piece)


def drop() -> None:
    """Forget what waits, after a step that failed: its ranks may not agree."""
    take()
