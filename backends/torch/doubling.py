"""Sums over ranks of plain tensors, in place: torch's all-reduce, and for small ones on gloo recursive doubling.

gloo's all-reduce is a ring: each rank sends 2 (n - 1) messages one after the other, each a part of the tensor. That is
best for large tensors; for small ones the time is that of the messages, however short. Recursive doubling (Rabenseifner
and Träff 2004) takes log2(n) messages one after the other, each with the whole tensor: ranks swap sums in pairs, then
in pairs of pairs, and so on. NCCL chooses among such algorithms itself.

Example: ranks 0 to 3 hold 1, 2, 3 and 4. Ranks 0 and 1 swap and both have 3; ranks 2 and 3 swap and have 7. Then rank 0
swaps with 2, and 1 with 3, and all have 10.
"""

from __future__ import annotations

import torch
import torch.distributed as torch_distributed

from keras_flow.backends.torch import profiling

#: bytes that a rank may receive in this way, all rounds together: a ring has it at most 2 of the tensor
_SMALL = 1 << 15
#: ranks up to which a ring passes on one number faster: it sends no empty parts, and all of it without Python
_FEW = 16
#: tells these messages from others between two ranks
_TAG = 0x6B66


def all_reduce(value: torch.Tensor, group: torch_distributed.ProcessGroup) -> None:
    """The sum over the ranks of a group, written over a contiguous value; equal on all in every bit."""
    count = group.size()
    is_small = value.nbytes * (count - 1).bit_length() <= _SMALL and not (value.numel() == 1 and count <= _FEW)
    if not is_small or torch_distributed.get_backend(group) != "gloo":
        torch_distributed.all_reduce(value, group=group)
        return
    with profiling.small_all_reduce(value):
        _by_doubling(value, group, group.rank(), count)


def _by_doubling(value: torch.Tensor, group: torch_distributed.ProcessGroup, place: int, count: int) -> None:
    received = torch.empty_like(value)
    half = 1 << (count.bit_length() - 1)  # ranks beyond the power of two give what they have to one below, and wait
    if place >= half:
        _send(value, group, place - half).wait()
        _receive(value, group, place - half).wait()
        return
    if place + half < count:
        _receive(received, group, place + half).wait()
        value.add_(received)
    reach = 1
    while reach < half:
        arrives = _receive(received, group, place ^ reach)
        _send(value, group, place ^ reach).wait()
        arrives.wait()
        value.add_(received)
        reach *= 2
    if place + half < count:
        _send(value, group, place + half).wait()


def _send(value: torch.Tensor, group: torch_distributed.ProcessGroup, place: int) -> torch_distributed.Work:
    work = torch_distributed.isend(value, group=group, tag=_TAG, group_dst=place)
    assert work is not None
    return work


def _receive(value: torch.Tensor, group: torch_distributed.ProcessGroup, place: int) -> torch_distributed.Work:
    work = torch_distributed.irecv(value, group=group, tag=_TAG, group_src=place)
    assert work is not None
    return work
