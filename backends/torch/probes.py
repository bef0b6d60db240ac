"""Probes on PyTorch: what `keras-flow doctor` asks of the engine itself."""

from __future__ import annotations

import time

import psutil
import torch
import torch.distributed as torch_distributed

from keras_flow.backends.torch import devices, layouts
from keras_flow.errors import FlowError


def free_memory() -> int:
    """Bytes that are free on the first device here; the host's where that is a CPU, or the engine cannot say."""
    if devices.world().type == "gpu":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available


def devices_seen() -> list[str]:
    """The devices of the type that Keras computes on, one text each."""
    if devices.world().type == "gpu":
        return [f"gpu:{number} {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())]
    return ["cpu:0"]


def all_reduce(elements: int, ranks: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` sums of a float32 tensor [elements] over the first `ranks` ranks.

    A collective of the whole job; the ranks beyond the first ones return an empty list.

    Raises:
        FlowError: a sum is wrong.
    """
    group, rank = layouts.group(tuple(range(ranks))), layouts.this_rank()
    device = devices.rank_devices()[rank]
    # the ranks that take part wait for these at the end, and the other way round: none runs ahead
    if rank >= ranks:
        torch_distributed.barrier()
        return []
    seconds = []
    for number in range(repeats + 1):
        value = torch.full((elements,), float(rank + 1), device=device)
        began = time.perf_counter()
        torch_distributed.all_reduce(value, group=group)
        total = float(value[-1])  # reading it waits for the device
        if number:  # the first connects the ranks
            seconds.append(time.perf_counter() - began)
        if total != ranks * (ranks + 1) / 2 or not bool((value == value[-1]).all()):
            raise FlowError(f"an all-reduce over {ranks} ranks gave a wrong sum on torch")
    if ranks < devices.world().size:
        torch_distributed.barrier()
    return seconds
