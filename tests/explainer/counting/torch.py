"""PyTorch: a dispatch mode sees every collective of c10d that a rank calls in one training step."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    import keras
    import numpy as np


@contextmanager
def watching() -> Iterator[list[dict[str, object]]]:
    """The collectives that this rank calls inside."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from keras_flow.backends.torch import doubling
    from keras_flow.backends.torch.rows.split_rows import SplitRows
    from tests.explainer.counting.collective import Counted

    found: list[dict[str, object]] = []

    def size_of(name: str) -> int:
        return torch.distributed.get_world_size(torch.distributed.distributed_c10d._resolve_process_group(name))

    def tensors(value: object) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        return [leaf for part in value for leaf in tensors(part)] if isinstance(value, (list, tuple)) else []

    original, messages = doubling._by_doubling, []

    def by_doubling(value: torch.Tensor, group: torch.distributed.ProcessGroup, place: int, count: int) -> None:
        if value.is_floating_point() and count > 1:
            found.append(Counted("all_reduce", value.numel(), value.element_size(), count, "by doubling").record())
        messages.append(value)
        original(value, group, place, count)
        messages.pop()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, (DTensor, SplitRows)) for kind in types):
                return NotImplemented  # these first: what they send comes here as plain tensors
            result = func(*args, **(kwargs or {}))
            name = func.name()
            if messages or not name.startswith(("c10d::", "_c10d_functional::")):
                return result
            operator = name.split("::")[1].split(".")[0]
            kind = next(
                (
                    kind
                    for text, kind in (
                        ("allreduce", "all_reduce"),
                        ("all_reduce", "all_reduce"),
                        ("allgather", "all_gather"),
                        ("all_gather", "all_gather"),
                        ("reduce_scatter", "reduce_scatter"),
                        ("alltoall", "all_to_all"),
                        ("all_to_all", "all_to_all"),
                        ("broadcast", "broadcast"),
                    )
                    if text in operator
                ),
                None,
            )
            if kind is None:
                assert any(word in operator for word in ("wait", "barrier", "wrap_tensor")), name
                return result
            if name.startswith("_c10d"):
                group = size_of(next(arg for arg in reversed(args) if isinstance(arg, str)))
            else:
                group = next(
                    torch.distributed.ProcessGroup.unbox(arg).size()
                    for arg in args
                    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
                )
            sent = tensors(args)
            largest = max((*sent, *tensors(result)), key=lambda tensor: tensor.numel())
            if not largest.is_floating_point():
                return result  # now and then ranks compare notes, as bytes: no part of a step
            found.append(Counted(kind, largest.numel(), largest.element_size(), group, name).record())
            return result

    # an all-reduce of several messages is one collective
    small = mock.patch.object(doubling, "_by_doubling", by_doubling)
    with Watch(), small:
        yield found


def count(name: str, layout: str) -> dict:
    """On every rank: one step of a model under a layout: what explain says, and what was counted."""
    from keras_flow.backends.torch import gradient_buckets
    from tests.explainer import models

    distribution = models.distribution(name, layout)
    with distribution.scope():
        model = models.compiled(name)
        said = distribution.explain(model, models.BATCH)
        x, y = models.data(model)
        model.train_on_batch(x, y)
        with watching() as counted:
            model.train_on_batch(x, y)
        held = said.memory[0].weights + said.memory[0].slots
        # gradients are summed in memory that stays from step to step
        if distribution.mirrored_view:
            held += sum(flat.nbytes for flat, _ in gradient_buckets.reducer(distribution.placement)._memory._tensors)
        peaks = [_most_allocated(model, x, y) for _ in range(3)]
    return {
        "explained": said.as_json()["collectives"],
        "counted": counted,
        "peak explained": said.memory[0].peak,
        "peak": held + min(peaks),  # the others hold what Python's collector has not come to
    }


def _most_allocated(model: keras.Model, x: np.ndarray, y: np.ndarray) -> int:
    """Most bytes that a step allocates at one time beyond variables and slots, by torch's profiler."""
    from torch.distributed import Work
    from torch.profiler import ProfilerActivity, profile

    wait = Work.wait

    def waited(work: Work, *args: object) -> bool:
        result = wait(work, *args)
        time.sleep(0.002)
        return result

    model.zero_grad()  # those of the step before
    gc.collect()
    # gloo's thread lets go of a message's tensors a little later, and the profiler does not see what that thread frees
    late = mock.patch.object(Work, "wait", waited)
    with late, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model.train_on_batch(x, y)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes))
