"""Tensors of the mirrored view of which each rank holds its own rows, until something asks for all of them.

What a row-wise layer hands back is a logical tensor to the program: it has the logical shape, and every operator sees
the logical value. But nothing is sent before an operator does; Keras's losses and metrics take the own rows and add up.

Example: 4 rows on 2 ranks. Rank 1 holds rows 2 and 3 of an output. `output.shape` is `(4, ...)`; `loss(y, output)` sums
the losses of rows 2 and 3, and reduces one number; `output * 2` gathers the rows of rank 0 first, on both ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
import torch.distributed as torch_distributed
from torch.utils._pytree import tree_map  # private: the trees that `__torch_dispatch__` is given are of this kind

from keras_flow.backends import leaves
from keras_flow.backends.reading.batch_watch import PartOfRows
from keras_flow.backends.torch import doubling
from keras_flow.backends.torch.collectives import as_sent
from keras_flow.backends.torch.step import OwnRows


class DeferredTensor(torch.Tensor):
    """A tensor with the logical value, for which something is sent when an operator asks for it."""

    # operators are caught below autograd: gradients are those of the tensor that comes of asking
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    #: whether an operator that returns the tensor it was given (in place) returns this one
    is_returned = True

    def whole(self) -> torch.Tensor:
        """The plain tensor, without a gradient. A collective of the ranks that share it, the first time."""
        raise NotImplementedError

    def given(self, shares: bool, writes: bool) -> torch.Tensor:
        """The plain tensor for an operator.

        Args:
            shares: the operator writes into it, or returns a view, which may be written into later.
            writes: the operator writes into it or another argument.
        """
        return self.whole()

    @classmethod
    def apart(
        cls, operator: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object | None:
        """What an operator gives from the parts alone, without the plain tensor; None where it needs that."""
        return None

    @classmethod
    def __torch_dispatch__(
        cls,
        operator: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        apart = cls.apart(operator, args, dict(kwargs or {}))
        if apart is not None:
            return apart
        writes = operator._schema.is_mutable
        shares = writes or any(value.alias_info for value in operator._schema.returns)
        seen: dict[int, DeferredTensor] = {}

        def whole(leaf: object) -> object:
            if not isinstance(leaf, DeferredTensor):
                return leaf
            value = leaf.given(shares, writes)
            if leaf.is_returned:
                seen[id(value)] = leaf
            return value

        out = operator(*tree_map(whole, args), **tree_map(whole, dict(kwargs or {})))
        return seen.get(id(out), out)

    # what torch does in C++ without an operator

    def numpy(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """The logical value."""
        return self.whole().numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """The logical value."""
        return self.whole().__array__(*args, **kwargs)

    def tolist(self) -> list:
        """The logical value."""
        return self.whole().tolist()

    def __repr__(self, **options: Any) -> str:
        return repr(self.whole())

    def __format__(self, spec: str) -> str:
        return format(self.whole(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)


class SplitRows(DeferredTensor):
    """A logical tensor of which this rank holds its own rows.

    Attributes:
        rows: which rows they are.
        origin: what was read of the batch, where the rows were read and not computed.
        source: this rank's rows as they were computed, for gradients by the tensor; None once it was written into.
    """

    rows: OwnRows
    origin: PartOfRows | None
    source: torch.Tensor | None
    _own: torch.Tensor | None
    _value: torch.Tensor
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, value: torch.Tensor, rows: OwnRows) -> SplitRows:
        """A tensor of the logical shape, without memory of its own."""
        shape = (rows.logical(value.shape[0]), *value.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=value.dtype, device=value.device)

    def __init__(self, value: torch.Tensor, rows: OwnRows) -> None:
        self.rows, self.origin, self.source = rows, None, None
        self._own, self._value, self._whole = None, value, None

    @property
    def own(self) -> torch.Tensor | None:
        """This rank's rows, part of its autograd graph; None once the program may have written into the tensor."""
        return self._own

    def whole(self) -> torch.Tensor:
        """All rows, without a gradient. A collective of the ranks that share them, the first time."""
        if self._whole is None:
            self._whole = gather(self._value, self.rows)
        return self._whole

    def given(self, shares: bool, writes: bool) -> torch.Tensor:
        """The plain tensor for an operator, after which these rows may not be its own."""
        if shares:
            self._own = None
        if writes:
            self.source = None
        return self.whole()


def split(value: torch.Tensor, rows: OwnRows, origin: PartOfRows | None = None) -> SplitRows:
    """The logical tensor of which `value` is this rank's rows; with its mask."""
    logical: SplitRows = _FromOwn.apply(value, rows) if torch.is_grad_enabled() else SplitRows(value, rows)
    logical._own, logical.source, logical.origin = value, value, origin
    leaves.with_mask_of(value, logical, lambda mask: split(mask, rows))
    return logical


def own_part(leaf: object, rows: OwnRows) -> object:
    """This rank's rows of a logical tensor that is equal on all ranks or split by the same rows; with their mask."""
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
        return leaf
    # the usual case: nothing is gathered to be cut again
    if isinstance(leaf, SplitRows) and leaf.own is not None and leaf.rows == rows and not _is_asked_for(leaf):
        return leaf.own
    piece = _ToOwn.apply(leaf, rows) if leaf.requires_grad else leaf[rows.own(leaf.shape[0])]
    return leaves.with_mask_of(leaf, piece, lambda mask: own_part(mask, rows))


def _is_asked_for(leaf: SplitRows) -> bool:
    """Whether the program wants the gradient of this logical tensor: it must be part of the graph then."""
    assert leaf.own is not None
    is_leaf_of_graph = leaf.requires_grad and not leaf.own.requires_grad
    return is_leaf_of_graph or bool(leaf._backward_hooks) or leaf.retains_grad


def own_in_graph(leaf: object) -> torch.Tensor | None:
    """This rank's rows of a logical tensor where further layers may have taken them in its place."""
    if not isinstance(leaf, SplitRows) or leaf.source is None or not leaf.source.requires_grad:
        return None
    return leaf.source


def gathered_gradient(grad: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """The gradient of a logical tensor of that of its own rows: the inverse of `_FromOwn.backward`."""
    return _Gather.apply(grad / rows.count, rows)


@overload
def gathered(leaf: torch.Tensor) -> torch.Tensor: ...
@overload
def gathered(leaf: object) -> object: ...
def gathered(leaf: object) -> object:
    """The plain tensor with the logical value, for what leaves a step; anything else as it is."""
    return leaf.whole() if isinstance(leaf, DeferredTensor) else leaf


def gather(value: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """All rows of a tensor of which this rank has its own. A collective of the ranks that share them."""
    (group,) = rows.groups
    value = value.detach().contiguous()
    lengths = [rows.length(index, value.shape[0]) for index in range(rows.count)]
    longest = max(lengths)
    # blocks that differ by a row travel padded to the longest: gloo gathers blocks of one size
    padded = (
        value if len(value) == longest else torch.cat([value, value.new_zeros(longest - len(value), *value.shape[1:])])
    )
    sent = as_sent(padded)
    arrived = sent.new_empty(rows.count * sent.numel())
    torch_distributed.all_gather_single(arrived, sent, group=group)
    out = arrived.view(value.dtype).view(rows.count * longest, *value.shape[1:])
    if len(set(lengths)) == 1:
        return out
    return torch.cat([block[:length] for block, length in zip(out.split(longest), lengths, strict=True)])


def total(value: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """The sum over the ranks of a number that each has of its own rows; for what all ranks compute alike from it."""
    return _Total.apply(value, rows)


def summed(value: torch.Tensor, groups: Sequence[torch_distributed.ProcessGroup]) -> torch.Tensor:
    """The sum over ranks, without a gradient; the value is written over."""
    for group in groups:
        doubling.all_reduce(value, group)
    return value


# Each of these is differentiated by another of them, so that gradients of gradients (a penalty on them) are right too.


class _FromOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, rows):
        ctx.rows = rows
        return SplitRows(value.detach(), rows)

    @staticmethod
    def backward(ctx, grad):
        # times the ranks: the reducer divides by them, so that what every rank computes whole counts once
        return _ToOwn.apply(grad, ctx.rows) * ctx.rows.count, None


class _ToOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, rows):
        ctx.rows = rows
        if isinstance(value, SplitRows) and value.own is not None and value.rows == rows:
            return value.own.detach().clone()
        whole = value.whole() if isinstance(value, SplitRows) else value
        return whole[rows.own(value.shape[0])].clone()

    @staticmethod
    def backward(ctx, grad):
        # the inverse of `_FromOwn.backward`: inside, gradients are those of the own rows times the ranks
        return gathered_gradient(grad, ctx.rows), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, rows):
        ctx.rows = rows
        return gather(value, rows)

    @staticmethod
    def backward(ctx, grad):
        return _ToOwn.apply(grad, ctx.rows) * ctx.rows.count, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, rows):
        ctx.count = rows.count
        return summed(value.clone(), rows.groups)

    @staticmethod
    def backward(ctx, grad):
        # all ranks compute the same from the sum, so its gradient is equal on them: nothing to send
        return grad * ctx.count, None
