"""`kf.comm` on torch: `torch.distributed` in groups that their members alone make.

Elements travel as bytes, since gloo does not know every dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keras_flow.backends.collective_engine import Counts, Pending
from keras_flow.backends.torch import simulated
from keras_flow.backends.torch.devices import rank_devices, world
from keras_flow.current import joining

#: what gloo and NCCL both know
REDUCED = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
)
#: op -> torch's
OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def key_of(value: object, rank: int) -> tuple[Any, ...] | None:
    """Return dtype and shape of a tensor that is no parameter and no DTensor and that autograd does not follow.

    It is where the rank computes.
    """
    if type(value) is not torch.Tensor or value.requires_grad or value.device != rank_devices()[rank]:
        return None
    return value.dtype, value.shape


def exchange(ranks: tuple[int, ...], values: Mapping[int, torch.Tensor], counts: Counts) -> Pending:
    """One `all_to_all_single`; between two ranks of which one sends, a message that needs no group."""
    if world().is_in_one_process:
        return simulated.exchange(ranks, values, counts)
    rank = world().local_ranks[0]
    me, value, table = ranks.index(rank), values[rank], counts.table
    outgoing = [count * value.itemsize for count in table[me]]
    incoming = [row[me] * value.itemsize for row in table]
    data = as_bytes(value)
    arrived = torch.empty(sum(incoming), dtype=torch.uint8, device=value.device)
    # by what both know: a rank's table has not what the other keeps
    if len(ranks) == 2 and not counts.longest[0] and not (table[0][1] and table[1][0]):
        other, work = ranks[1 - me], None
        if arrived.numel():
            work = dist.irecv(arrived, other)
        elif data.numel():
            work = dist.isend(data, other)
    else:
        work = dist.all_to_all_single(arrived, data, incoming, outgoing, group=process_group(ranks), async_op=True)
    return _begun(work, lambda: {rank: arrived.view(value.dtype)}, data)


def gather_all(ranks: tuple[int, ...], values: Mapping[int, torch.Tensor], counts: Sequence[int]) -> Pending:
    """torch's own where sizes are equal; it wants padding where they are not."""
    if world().is_in_one_process:
        return simulated.gather_all(ranks, values)
    rank = world().local_ranks[0]
    value = values[rank]
    if len(set(counts)) > 1:
        copies = torch.cat([value] * len(ranks))
        return exchange(ranks, {rank: copies}, Counts.of([[count] * len(ranks) for count in counts]))
    data = as_sent(value)
    joined = data.new_empty(data.numel() * len(ranks))
    work = dist.all_gather_single(joined, data, group=process_group(ranks), async_op=True) if data.numel() else None
    return _begun(work, lambda: {rank: joined.view(value.dtype)}, data)


def native(kind: str, ranks: tuple[int, ...], values: Mapping[int, torch.Tensor], how: str | int) -> Pending | None:
    """torch's all-reduce and broadcast, which write into a copy."""
    if world().is_in_one_process:
        return None
    rank = world().local_ranks[0]
    result = values[rank].detach().clone(memory_format=torch.contiguous_format)
    if not result.numel():
        return Pending(lambda: {rank: result})
    if kind == "all_reduce":
        if result.dtype not in REDUCED:
            return None
        work = dist.all_reduce(result, OPS[str(how)], group=process_group(ranks), async_op=True)
    else:
        work = dist.broadcast(as_bytes(result), int(how), group=process_group(ranks), async_op=True)
    return _begun(work, lambda: {rank: result})


def fold(rows: torch.Tensor, op: str) -> torch.Tensor:
    """Rows [ranks, elements] as one, in their dtype."""
    dtype = rows.dtype
    # torch computes little with unsigned numbers of more than 8 bits, which are exact in int64 modulo their size
    if dtype in (torch.uint16, torch.uint32, torch.bool):
        rows = rows.to(torch.int64)
    elif dtype == torch.uint64:
        rows = rows.view(torch.int64)
        if op in ("min", "max"):  # the order of unsigned numbers, by their highest bit
            rows = rows ^ torch.iinfo(torch.int64).min
    if op == "sum":
        out = rows.sum(0, dtype=rows.dtype)
    elif op == "product":
        out = rows.prod(0, dtype=rows.dtype)
    else:
        out = rows.amin(0) if op == "min" else rows.amax(0)
    if dtype == torch.uint64:
        return (out ^ torch.iinfo(torch.int64).min if op in ("min", "max") else out).view(dtype)
    return out.to(dtype)


def reshape(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor in another shape."""
    return value.reshape(shape)


def join(flat: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join flat tensors, one after the other."""
    return torch.cat(list(flat))


def shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape as a plain tuple."""
    return tuple(value.shape)


def without_gradient(value: torch.Tensor) -> torch.Tensor:
    """Detached."""
    return value.detach()


def is_recorded(values: Sequence[torch.Tensor]) -> bool:
    """Whether autograd follows one of them."""
    return any(value.requires_grad for value in values)


def with_gradient(
    forward: Callable[[Sequence[Any]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """Make it one node of autograd's graph."""
    return list(_WithGradient.apply(forward, backward, *values))  # pyright: ignore[reportArgumentType]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable, backward: Callable, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.pullback = backward
        return tuple(forward(values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        return None, None, *ctx.pullback(cotangents)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of an array."""
    flat = value.detach().contiguous().reshape(-1)
    # there is no view of nothing as another dtype
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=value.device)


def as_sent(value: torch.Tensor) -> torch.Tensor:
    """The memory of an array, flat: in its dtype where all transports know that, otherwise as bytes."""
    return value.detach().contiguous().reshape(-1) if value.dtype in REDUCED else as_bytes(value)


def _begun(work: Any, give: Callable[[], Mapping[int, torch.Tensor]], read: torch.Tensor | None = None) -> Pending:
    """Return what `give` returns, pending until `work` has ended; `read`, which is being sent, is kept until then."""

    def results() -> Mapping[int, torch.Tensor]:
        nonlocal read
        if work is not None:
            work.wait()
        read = None
        return give()

    return Pending(results, (lambda: True) if work is None else work.is_completed)


def process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of these ranks, in ascending order, which only they make: others need not call."""
    return _group_of(tuple(sorted(ranks)))


def forget_groups() -> None:
    """Forget the process groups, which have ended; the next messages make new ones."""
    _group_of.cache_clear()


@functools.cache
def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if ranks == tuple(range(world().size)):
        return None  # torch's name for all
    # torch names such a group by its ranks and by how many groups the process has made, which is not the same in all of
    # them: they would wait for each other for ever (docs/engine-bugs.md). Private, looked up in torch 2.13.
    torchs = dist.distributed_c10d._hash_ranks_to_str
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: "keras_flow.comm " + "_".join(map(str, ranks))
    try:
        limit = timedelta(seconds=joining.waiting_seconds())
        return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)  # pyright: ignore
    finally:
        dist.distributed_c10d._hash_ranks_to_str = torchs
