"""Gradients in buckets: averaged over the ranks while the backward pass goes on.

As torch's DistributedDataParallel does (Li et al., VLDB 2020), gradients that are ready are copied into a flat tensor.
A full one is summed by one all-reduce, while the pass computes the next. The last bucket takes along what the loss adds
to the logs.

Example: weights of 3 MB, 2 MB and 1 MB, whose gradients are ready in this order, on 2 ranks. The first two make a
bucket of 5 MB, which is sent when the second is there; the third is sent when the pass ends. Both ranks then hold the
means.

Where slots are split further than their variable (`zero=`) a rank gets its part of the mean alone, by a reduce-scatter,
and the gradient becomes a DTensor in the layout of the slots: during the pass with `zero=2`, at its end with `zero=1`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_distributed
from torch.distributed.tensor import DTensor

from keras_flow.backends import states
from keras_flow.backends.torch import layouts, profiling, slot_parts
from keras_flow.backends.torch.rows import partial_numbers
from keras_flow.backends.torch.rows.partial_numbers import Addition
from keras_flow.backends.torch.slot_parts import Scatter, Scatters, SlotPart, buckets, part_of
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

if TYPE_CHECKING:
    import keras


class _FlatMemory:
    """Flat tensors of buckets, taken again once nothing of the gradients that they became is held any more.

    New memory in each step would cost as much as the sum of its gradients: the system clears each page.
    """

    def __init__(self) -> None:
        #: the tensors, and how many hold the memory of one that is free
        self._tensors: list[tuple[torch.Tensor, int]] = []

    def of(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of this length, of the dtype and on the device of another; its values are any."""
        for place, (flat, idle) in enumerate(self._tensors):
            if flat.dtype != like.dtype or flat.device != like.device or _holders(flat) != idle:
                continue
            if len(flat) == length:
                return flat
            # another model, or another order of its gradients: it is free, and no use
            del self._tensors[place]
            break
        flat = torch.empty(length, dtype=like.dtype, device=like.device)
        self._tensors.append((flat, _holders(flat)))
        return flat


def _holders(flat: torch.Tensor) -> int:
    """How many tensors have a tensor's memory; private, checked with torch 2.13."""
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)


_reducers: dict[Placement, Reducer] = {}


def reducer(placement: Placement) -> Reducer:
    """The gradient reducer of a placement's ranks."""
    if placement not in _reducers:
        _reducers[placement] = Reducer(placement)
    return _reducers[placement]


class Reducer:
    """Averages gradients over the ranks while the backward pass goes on, in buckets, complete when `backward` returns.

    Gradients become ready in the same order on all ranks, because all run the same graph, so buckets are filled as they
    come.

    Attributes:
        on: a layer of this step was computed by own rows; otherwise all ranks hold the same gradients already.
        collectives: number of all-reduces and reduce-scatters so far.
    """

    def __init__(self, placement: Placement):
        self._placement = placement
        self._waiting: list[torch.nn.Parameter] = []
        self._bytes = 0
        #: with the views of each flat tensor, without which it would count as free while it travels
        self._sent: list[
            tuple[torch_distributed.Work | None, tuple[torch.Tensor, ...], list[torch.nn.Parameter], list[Addition]]
        ] = []
        #: gradients of which each rank gets a part
        self._split: list[torch.nn.Parameter] = []
        self._split_bytes = 0
        self._scatters = Scatters()
        self._memory, self._watched = _FlatMemory(), []
        #: forgets the memory of a model's gradients when the model goes
        self._end: weakref.finalize | None = None
        self._closing = False
        self.on = False
        self.collectives = 0

    def attach(self, variables: Sequence[keras.Variable]) -> None:
        """Watch the gradients of these variables; called before each training step, so new ones are found."""
        self.reset()
        watched = [id(variable) for variable in variables]
        if watched != self._watched:  # of another model
            self._forget()
            self._watched = watched
            if variables:
                self._end = weakref.finalize(variables[0], self._forget)
                self._end.atexit = False
        self._watch(variables)

    def watch_further(self, variables: Sequence[keras.Variable]) -> None:
        """Watch those that are not watched yet: a `train_step` may train what was frozen when the step began."""
        self._watch([each for each in variables if not self._has_hook(each._value)])

    def _has_hook(self, stored: object) -> bool:
        # a Parameter that was used under several placements has a hook of each
        return self in getattr(stored, "_keras_flow_reducers", ())

    def _watch(self, variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            stored = variable._value
            if isinstance(stored, DTensor):  # gathered for its use: its gradient arrives summed and cut
                continue
            # what it is given is its next value: not averaged, so that a difference is found (`state_copies`)
            if states.is_overwritten(variable):
                stored._keras_flow_overwritten = True
                continue
            if stored is not None:
                stored._keras_flow_part = part_of(variable)
            # a variable that was re-laid has a new Parameter, without a hook
            if stored is not None and stored.requires_grad and not self._has_hook(stored):
                stored.register_post_accumulate_grad_hook(self._ready)
                stored._keras_flow_reducers = {*getattr(stored, "_keras_flow_reducers", ()), self}
                stored._keras_flow_path = variable.path

    def reset(self) -> None:
        """Forget a pass that did not end."""
        if self._sent:  # still on their way into this memory
            self._memory = _FlatMemory()
        self._waiting, self._sent, self._bytes, self._closing, self.on = [], [], 0, False, False
        self._split, self._split_bytes, self._scatters = [], 0, Scatters()

    def _forget(self) -> None:
        self._memory, self._watched = _FlatMemory(), []
        if self._end is not None:
            self._end.detach()
            self._end = None

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        # no layer computed own rows: all ranks have the same gradients
        if not self.on:
            return
        if not self._closing:
            self._closing = True
            # runs when this backward pass ends: only then is it known that no gradient is left to send
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        part: SlotPart | None = parameter._keras_flow_part  # type: ignore[assignment]
        if part is not None:
            if isinstance(parameter.grad, DTensor):  # what autograd added up is a part and a whole
                raise FlowError(
                    f"backward() was called twice before one optimizer.apply, under zero=: the gradient of "
                    f"{parameter._keras_flow_path!r} is split over the ranks since the first call. Call "  # type: ignore[attr-defined]
                    "optimizer.apply after each backward(); to add up several gradients, take "
                    "gradient_accumulation_steps, or add the losses up and call backward() once"
                )
            self._split.append(parameter)
            self._split_bytes += parameter.nbytes
            if part.at_once and self._split_bytes >= slot_parts.BUCKET_BYTES:
                self._scatter()
            return
        # a bucket is one flat tensor, which has one dtype
        if self._waiting and self._waiting[-1].dtype != parameter.dtype:
            self._send()
        self._waiting.append(parameter)
        self._bytes += parameter.numel() * parameter.element_size()
        if self._bytes >= slot_parts.BUCKET_BYTES:
            self._send()

    def _send(self, last: bool = False) -> None:
        if not self._waiting:
            return
        group = layouts.group(self._placement.ranks)
        # the loss is known by now, and what it adds to the logs needs no message of its own
        additions = partial_numbers.take(group, self._waiting[0].dtype) if last else []
        gradients = [parameter.grad.reshape(-1) for parameter in self._waiting]  # type: ignore[union-attr]
        added = [addition.value.reshape(-1) for addition in additions]
        flat = self._memory.of(sum(map(len, (*gradients, *added))), gradients[0])
        sizes = [*map(len, gradients), sum(map(len, added))]
        pieces = flat.split(sizes)
        for gradient, piece in zip(gradients, pieces, strict=False):
            # before the sum: half precision would overflow after it
            torch.div(gradient, len(self._placement.ranks), out=piece)
        for value, piece in zip(added, pieces[-1].split([len(value) for value in added]), strict=True):
            piece.copy_(value)
        with profiling.gradients_of(parameter._keras_flow_path for parameter in self._waiting):  # type: ignore[attr-defined]
            work = torch_distributed.all_reduce(flat, group=group, async_op=True)
        self._sent.append((work, pieces, self._waiting, additions))
        self._waiting, self._bytes = [], 0
        self.collectives += 1

    def _scatter(self) -> None:
        """Send the gradients of which each rank gets a part; those of one dtype over the same axes travel together."""
        alike: dict[object, list[torch.nn.Parameter]] = {}
        for parameter in self._split:
            axes = tuple(axis for axis, _ in parameter._keras_flow_part.axes)  # type: ignore[attr-defined]
            alike.setdefault((axes, parameter.dtype), []).append(parameter)
        self._split, self._split_bytes = [], 0
        for parameters in alike.values():
            for indices in buckets([parameter.nbytes for parameter in parameters]):
                chosen = [parameters[index] for index in indices]
                parts: list[SlotPart] = [parameter._keras_flow_part for parameter in chosen]  # type: ignore[misc]
                split = [axis for axis, _ in parts[0].axes]
                others = [axis for axis in range(parts[0].mesh.ndim) if axis not in split]
                gradients = [parameter.grad for parameter in chosen]
                for parameter in chosen:
                    parameter.grad = None  # the whole gradient is not needed any more
                paths = [parameter._keras_flow_path for parameter in chosen]  # type: ignore[attr-defined]
                scatter = Scatter(gradients, parts, others, len(self._placement.ranks), paths)  # type: ignore[arg-type]
                del gradients
                self._scatters.add(scatter, chosen)
                self.collectives += 1

    def _finish(self) -> None:
        self._scatter()
        self._send(last=True)
        for parameter, piece in self._scatters.finish():
            part = parameter._keras_flow_part  # type: ignore[attr-defined]
            parameter.grad = part.as_dtensor(piece, parameter.shape)  # type: ignore[attr-defined]
        self._scatters = Scatters()
        sent, self._sent, self._closing = self._sent, [], False
        for work, pieces, parameters, additions in sent:
            if work is not None:
                work.wait()
            for parameter, piece in zip(parameters, pieces, strict=False):
                parameter.grad = piece.view(parameter.shape)
            partial_numbers.finish(additions, pieces[-1])
