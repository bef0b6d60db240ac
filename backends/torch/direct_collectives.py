"""Calls of `kf.comm` that were made before, each as one call of torch: nothing is looked up or checked again.

They send the same messages as the calls of `collectives`. So some ranks of a group may make a direct call while others,
whose tensors have gradients, make the ordinary one. The methods of a process group are called with options that are
made once; `dist.all_reduce` and its like make them anew for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from keras_flow.backends.collective_engine import Pending
from keras_flow.backends.torch.collectives import OPS, REDUCED, fold, process_group
from keras_flow.backends.torch.devices import world

_Run = Callable[[Any], Any]
#: takes the running work and the tensors that it writes; waits and returns them, or returns a `Pending` at once
_End = Callable[..., Any]


def direct(
    call: str, ranks: tuple[int, ...], like: torch.Tensor | list[torch.Tensor], how: tuple[Any, ...], async_op: bool
) -> _Run | None:
    """Make the function for dtypes that gloo and NCCL both know, in several processes."""
    given = like if isinstance(like, list) else [like]
    if world().is_in_one_process or not all(each.numel() for each in given) or given[0].dtype not in REDUCED:
        return None
    group = (None if call in ("send", "recv") else process_group(ranks)) or dist.group.WORLD
    assert group is not None
    end = _pending if async_op else _waited
    if call in ("send", "recv"):  # which need no group of their own
        return _message(call, group, given[0], how[0])
    if call in ("all_reduce", "broadcast", "reduce"):
        return _written(call, group, ranks, how, end)
    if call in ("all_gather", "all_gather_into_tensor"):
        return _gathered(group, given[0], call == "all_gather", end)
    if call in ("reduce_scatter", "reduce_scatter_tensor"):
        return _scattered(group, like, how[0], end)
    if call == "all_to_all":
        return _exchanged(group, given, end)
    if call == "barrier":
        return lambda _: dist.barrier(group)
    return _from_or_to_one(call, group, ranks, given[0], how[0])


def _written(call: str, group: dist.ProcessGroup, ranks: tuple[int, ...], how: tuple[Any, ...], end: _End) -> _Run:
    """Return the function that runs a call of torch on a copy of a tensor, since torch writes into what it is given."""
    run: Any = {"all_reduce": group.allreduce, "broadcast": group.broadcast, "reduce": group.reduce}[call]
    if call == "broadcast":
        options = _options(dist.BroadcastOptions(), end, rootRank=ranks.index(how[0]), rootTensor=0)
    elif call == "all_reduce":
        options = _options(dist.AllreduceOptions(), end, reduceOp=OPS[how[0]])
    else:
        options = _options(dist.ReduceOptions(), end, reduceOp=OPS[how[0]], rootRank=ranks.index(how[1]))
    keeps_own = call == "reduce" and how[1] != world().local_ranks[0]

    def written(value: torch.Tensor) -> Any:
        result = value.clone(memory_format=torch.contiguous_format)
        return end(run([result], options), value if keeps_own else result)

    return written


def _gathered(group: dist.ProcessGroup, like: torch.Tensor, is_listed: bool, end: _End) -> _Run:
    """The tensors of all, which are of one shape."""
    count, shape = group.size(), tuple(like.shape)
    joined = (count * shape[0], *shape[1:]) if shape else (count,)

    def listed(value: torch.Tensor) -> Any:
        parts = [value.new_empty(shape) for _ in range(count)]
        return end(group.allgather([parts], [value.contiguous()]), parts)

    def gathered(value: torch.Tensor) -> Any:
        result = value.new_empty(joined)
        return end(group.all_gather_single(result, value.contiguous().view(shape or (1,))), result)

    return listed if is_listed else gathered


def _scattered(group: dist.ProcessGroup, like: torch.Tensor | list[torch.Tensor], op: str, end: _End) -> _Run:
    """Parts that are exchanged and added up, of a list, or of one tensor's dim 0."""
    count, place, run = group.size(), group.rank(), group.all_to_all_single
    options = _options(dist.AllToAllOptions(), end)
    if isinstance(like, list):
        shape, sizes = tuple(like[place].shape), [each.numel() for each in like]
        part = sizes[place]
    else:
        shape, part = (like.shape[0] // count, *like.shape[1:]), like.numel() // count
        sizes = []  # equal ones

    def added(arrived: torch.Tensor) -> torch.Tensor:
        return fold(arrived.view(count, part), op).view(shape)

    def scattered(value: Any) -> Any:
        flat = torch.cat([each.reshape(-1) for each in value]) if sizes else value.contiguous().view(-1)
        arrived = flat.new_empty(count * part)
        return end(run(arrived, flat, [part] * count if sizes else [], sizes, options), arrived, added)

    return scattered


def _exchanged(group: dist.ProcessGroup, like: list[torch.Tensor], end: _End) -> _Run:
    """A tensor for each, all of one shape."""
    shape, places, run = (len(like), *like[0].shape), range(len(like)), group.all_to_all_single
    options = _options(dist.AllToAllOptions(), end)

    def exchanged(values: list[torch.Tensor]) -> Any:
        flat = torch.stack(values)
        result = flat.new_empty(shape)
        return end(run(result, flat, [], [], options), [result[place] for place in places])

    return exchanged


def _from_or_to_one(call: str, group: dist.ProcessGroup, ranks: tuple[int, ...], like: torch.Tensor, one: int) -> _Run:
    """A gather to one rank, and a scatter from it."""
    shape, dtype, device, is_one = tuple(like.shape), like.dtype, like.device, world().local_ranks[0] == one
    options = dist.GatherOptions() if call == "gather" else dist.ScatterOptions()
    options = _options(options, _waited, rootRank=ranks.index(one))
    run: Any = group.gather if call == "gather" else group.scatter

    def gathered(value: torch.Tensor) -> list[torch.Tensor] | None:
        parts = [value.new_empty(shape) for _ in ranks] if is_one else None
        return _waited(run([parts] if parts else [], [value.contiguous()], options), parts)

    def scattered(values: list[torch.Tensor] | None) -> torch.Tensor:
        result = torch.empty(shape, dtype=dtype, device=device)
        return _waited(run([result], [[each.contiguous() for each in values]] if values else [], options), result)

    return gathered if call == "gather" else scattered


def _message(call: str, group: dist.ProcessGroup, like: torch.Tensor, other: int) -> _Run:
    shape, dtype, device = tuple(like.shape), like.dtype, like.device

    def send(value: torch.Tensor) -> None:
        group.send([value.contiguous()], other, 0).wait()

    def receive(_: None) -> torch.Tensor:
        result = torch.empty(shape, dtype=dtype, device=device)
        group.recv([result], other, 0).wait()
        return result

    return send if call == "send" else receive


def _options(options: Any, end: _End, **values: Any) -> Any:
    """Options of a group's method, which tells NCCL whether its stream is waited for."""
    for name, value in {"asyncOp": end is _pending, **values}.items():
        setattr(options, name, value)
    return options


def _waited(work: Any, result: Any, finish: _Run | None = None) -> Any:
    """Wait for the work, and return the finished result."""
    if work is not None:
        work.wait()
    return finish(result) if finish else result


def _pending(work: Any, result: Any, finish: _Run | None = None) -> Pending:
    """Return what is made of the result later; until then the work keeps what it sends."""
    rank = world().local_ranks[0]
    return Pending(lambda: {rank: _waited(work, result, finish)}, work.is_completed if work else lambda: True)
