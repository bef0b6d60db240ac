"""Weights that are held split further than they are used (`zero=3`): gathered where they are read, and not kept.

A layer that reads a weight gets it gathered; the gradient goes back as a reduce-scatter. Autograd would keep the whole
weight until the backward pass has used it. It keeps a note instead, by which the weight is gathered again (hooks on
saved tensors), so that a rank has few whole weights at any time. In FSDP's words: `reshard_after_forward`.

While a layer computes, the weight that the step before gathered next is on its way already (`Order`). FSDP calls this
prefetching. A rank then has two whole weights at a time.

Example: a kernel [4, 8] on two ranks, of which rank 0 holds rows 0 and 1. `x K` gathers rows 2 and 3, computes, and
drops them. The gradient of x gathers them again. Of the gradient of K, rank 0 receives rows 0 and 1 of rank 1's rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends.hooking import hook
from keras_flow.backends.row_wise import row_interaction
from keras_flow.backends.torch import layouts, slot_parts, variables
from keras_flow.backends.torch.slot_parts import SlotPart
from keras_flow.backends.torch.step import RunningStep, current_step
from keras_flow.current.keras_places import get_global_attribute
from keras_flow.current.variable_layout import keras_layout

if TYPE_CHECKING:
    import keras

    from keras_flow.backends.torch.layouts import TorchPlacements


def placements_of_use(variable: keras.Variable) -> TorchPlacements:
    """The layout in which a variable that is a DTensor is computed with: its own, where it is held as it is used."""
    layout = keras_layout(variable)
    if layout is None or layout.given.used is None:
        return variable._value.placements
    return layouts.engine_layout(layout.given.used)


def is_held_split(variable: keras.Variable) -> bool:
    """Whether a variable is gathered for its use."""
    return slot_parts.held_part_of(variable) is not None


# ---- reading


def read_in_step(variable: keras.Variable, value: object) -> RunningStep | None:
    """Condition of the hook on what a variable gives when it is read: the step, while a layer is called.

    Outside of layers Keras asks a weight for its gradient, and an optimizer computes with what ranks hold.
    """
    step = current_step()
    if step is None or (step.inside is None and get_global_attribute("current_call_ctx") is None):
        return None
    return step if value is variable._value and is_held_split(variable) else None


@hook("keras.Variable", "_maybe_autocast", "zero=3: layers would meet a rank's part of a weight", when=read_in_step)
def read(step: RunningStep, original: Callable[..., torch.Tensor], variable: keras.Variable, value: DTensor) -> object:
    """Hook on `Variable._maybe_autocast`, which a value passes when it is read: gathered for its use."""
    if step.consistent and step.inside is None:
        return original(variable, value.redistribute(value.device_mesh, placements_of_use(variable)))
    whole, route = _gathered(step, variable)
    cast = original(variable, whole)
    if cast is not whole:
        _note(step, cast, variable, route)
    return cast


def plain(step: RunningStep, variable: keras.Variable, sums: Collection[int] | None = None) -> torch.Tensor:
    """This rank's plain value of a variable as it is used; see `_gathered`."""
    return _gathered(step, variable, sums)[0]


def _gathered(
    step: RunningStep, variable: keras.Variable, sums: Collection[int] | None = None
) -> tuple[torch.Tensor, _Route]:
    """This rank's plain value of a variable as it is used, and how it came.

    Args:
        sums: the axes of the mesh over which the gradients of the ranks' values are summed; by default those of the
            rows that the step computes. In the mirrored view it is all of them, and a mean.
    """
    part = slot_parts.held_part_of(variable)
    assert part is not None
    mean = not step.consistent
    if sums is None:
        sums = range(part.mesh.ndim) if step.inside is None or mean else step.inside.axes
    value = variable._value
    route = _Route(part, tuple(value.shape), tuple(sums), value.device_mesh.size() if mean else 1)
    ahead = step.gathered
    gather = functools.partial(route.gathered, value) if ahead is None else functools.partial(ahead.next, value, route)
    whole = _Assembled.apply(value, route, gather) if value.requires_grad and torch.is_grad_enabled() else gather()
    _note(step, whole, variable, route)
    return whole, route


@dataclass(frozen=True)
class _Route:
    """A weight's route to its use, and its gradient's route back.

    Attributes:
        part: what this rank holds of what it uses.
        shape: the shape of the weight.
        axes: the axes of the mesh over which gradients are summed.
        divisor: what their sum is divided by.
    """

    part: SlotPart
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    divisor: int

    def gathered(self, value: DTensor) -> torch.Tensor:
        """Return what this rank uses of a weight."""
        return self.begun(value).wait()[0]

    def begun(self, value: DTensor) -> slot_parts.PartsGather:
        """Begin to gather what this rank uses of a weight."""
        own = value._local_tensor.detach()
        shape = list(own.shape)
        for axis, dim in self.part.axes:
            shape[dim] *= self.part.mesh.size(axis)
        return slot_parts.PartsGather([own.contiguous()], [self.part], [own.new_empty(shape)])

    def scattered(self, gradient: torch.Tensor) -> DTensor:
        """This rank's part of the sum of all ranks' gradients."""
        split = [axis for axis, _ in self.part.axes]
        if set(split) <= set(self.axes):
            others = [axis for axis in self.axes if axis not in split]
            (own,) = slot_parts.Scatter([gradient], [self.part], others, self.divisor).wait()
        else:  # all ranks have computed the same rows
            own = self.part.cut(gradient).contiguous()
        return self.part.as_dtensor(own, self.shape)


# Each is differentiated by the other, so that gradients of gradients are right too.


class _Assembled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, route, gather):
        ctx.route = route
        ctx.set_materialize_grads(False)
        return gather()

    @staticmethod
    def backward(ctx, grad):
        return (None if grad is None else _Distributed.apply(grad, ctx.route)), None, None


class _Distributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, route):
        ctx.route = route
        ctx.set_materialize_grads(False)
        return route.scattered(gradient)

    @staticmethod
    def backward(ctx, grad):
        return (None if grad is None else _again(grad, ctx.route)), None


def _again(part: DTensor, route: _Route) -> torch.Tensor:
    return _Assembled.apply(part, route, functools.partial(route.gathered, part)) / route.divisor


@contextlib.contextmanager
def within_call(step: RunningStep, layer: keras.Layer) -> Iterator[None]:
    """A layer is called: what it gathers is known until its end, and a recurrent one gathers once for all time steps.

    Whole weights of a recurrent layer are kept for the backward pass, which would gather them at each step.
    """
    known = None if step.gathered is None else dict(step.gathered.sources)
    held: list[tuple[keras.Variable, torch.Tensor]] = []
    if not (step.consistent and step.inside is None) and row_interaction.is_recurrent(layer):
        held = [(each, plain(step, each)) for each in layer.variables if is_held_split(each)]
        if known is not None:
            step.gathered.sources = dict(known)  # type: ignore[union-attr]
    try:
        with variables.holding(held):
            yield
    finally:
        if known is not None:
            step.gathered.sources = known  # type: ignore[union-attr]


# ---- what autograd keeps


@dataclass(frozen=True)
class _Again:
    """How to gather what autograd would have kept: which variable, as which dtype, and which view of it."""

    value: DTensor
    version: int
    route: _Route
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Order:
    """The weights that a step gathered, forward and backward, in order: the next step's are expected to be the same.

    Each is `(value of the variable, route)`. A step that goes another way drops what came in vain, and gathers what it
    needs.
    """

    def __init__(self) -> None:
        self.expected: list[tuple[DTensor, _Route]] = []


class Gathered:
    """The whole weights that the layers which are being called have: where each came from.

    All ranks gather alike, or they wait for each other without end. So nothing here depends on when Python frees a
    tensor: a whole weight is held until its layer's call ends, and an `Order` holds what it names.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._seen: list[tuple[DTensor, _Route]] = []
        self._coming: tuple[DTensor, int, _Route, slot_parts.PartsGather] | None = None
        #: where its memory is -> the whole weight, how often it was written, the variable's value, and its route
        self.sources: dict[int, tuple[torch.Tensor, int, DTensor, _Route]] = {}
        #: the one that the backward pass gathered last: a layer may have kept several views of it
        self._last: tuple[object, torch.Tensor] | None = None

    def next(self, value: DTensor, route: _Route) -> torch.Tensor:
        """Return what this rank uses of a weight, and begin to gather the weight that is expected after it."""
        here, coming = len(self._seen), self._coming
        self._seen.append((value, route))
        whole = None
        if coming is not None:
            (arrived,) = coming[3].wait()
            if coming[0] is value and coming[1] == value._local_tensor._version and coming[2] == route:
                whole = arrived
        if whole is None:
            whole = route.gathered(value)
        self._coming, expected = None, self._order.expected
        if here + 1 < len(expected) and expected[here][0] is value:
            following, its_route = expected[here + 1]
            self._coming = following, following._local_tensor._version, its_route, its_route.begun(following)
        return whole

    def finish(self) -> None:
        """The step has ended: the next one is expected to gather alike."""
        if self._coming is not None:
            self._coming[3].wait()
        self._order.expected, self._coming = self._seen, None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | _Again:
        """Return what autograd keeps in a tensor's place: the way to gather it again, where it is a gathered weight."""
        if type(tensor) is not torch.Tensor:
            return tensor
        found = self.sources.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        whole, version, value, route = found
        if whole._version != version:  # the layer has written into it
            return tensor
        return _Again(
            value,
            value._local_tensor._version,
            route,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),  # type: ignore[arg-type]
        )

    def give(self, kept: torch.Tensor | _Again) -> torch.Tensor:
        """Return the tensor that autograd wanted kept, gathered again where `keep` replaced it."""
        if not isinstance(kept, _Again):
            return kept
        if kept.value._local_tensor._version != kept.version:
            raise RuntimeError(
                f"a weight of shape {list(kept.value.shape)} was changed between the forward and the backward pass "
                "that uses it"
            )
        key = (id(kept.value), kept.dtype)
        if self._last is None or self._last[0] != key:
            self._last = None
            with torch.no_grad():
                self._last = key, self.next(kept.value, kept.route).to(kept.dtype)
        return self._last[1].as_strided(kept.size, kept.stride, kept.offset)


def _note(step: RunningStep, whole: torch.Tensor, variable: keras.Variable, route: _Route) -> None:
    if step.gathered is not None and torch.is_grad_enabled():  # a frozen one is kept for the gradient by its inputs
        where = whole.untyped_storage().data_ptr()
        step.gathered.sources[where] = whole, whole._version, variable._value, route


@contextlib.contextmanager
def not_kept(step: RunningStep, order: Order) -> Iterator[None]:
    """Inside, autograd keeps no whole weight of a step with `zero=3`.

    Args:
        step: the step.
        order: the order in which steps of this function read weights.
    """
    if not step.distribution.gathers_weights:
        yield
        return
    step.gathered = Gathered(order)
    try:
        with torch.autograd.graph.saved_tensors_hooks(step.gathered.keep, step.gathered.give):
            yield
        step.gathered.finish()
    finally:
        step.gathered = None
