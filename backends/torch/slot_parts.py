"""A rank's part of what it has of a variable, where slots are split further than the variable (`zero=`).

Three things are done with parts: the sum of a gradient goes to the rank that keeps the part (a reduce-scatter), the
optimizer updates the part, and the new parts are gathered. Each goes along one axis of the mesh after the other, which
receives no more bytes than all axes at once.

Example: a kernel [6, 8] on 2 ranks, whose slots have S(0). Rank 0 sends rows 3 to 5 of its gradient to rank 1, adds
rows 0 to 2 of both gradients, updates its rows 0 to 2, and receives the new rows 3 to 5.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import doubling, layouts, local_tensors, profiling
from keras_flow.backends.torch.variables import holding
from keras_flow.current.variable_layout import keras_layout
from keras_flow.layout import Layout

if TYPE_CHECKING:
    import keras

#: bytes that travel together
BUCKET_BYTES = 4 << 20
#: buckets that may be on their way while another is packed: each is twice its memory, beside the gradients
_UNDER_WAY = 1


@dataclass(frozen=True)
class SlotPart:
    """Which part of its piece of a variable a rank keeps slots of.

    Attributes:
        mesh: the mesh of the placement.
        axes: axes of the mesh over which slots are split and the variable is not, outer first, each with its dim.
        placements: the layout of the slots.
        at_once: whether a gradient is cut as soon as it is known (`zero=2`); otherwise at the end of the backward pass.
    """

    mesh: DeviceMesh
    axes: tuple[tuple[int, int], ...]
    placements: layouts.TorchPlacements
    at_once: bool

    def cut(self, piece: torch.Tensor) -> torch.Tensor:
        """The part of a rank's piece, a view."""
        for axis, dim in self.axes:
            length = piece.shape[dim] // self.mesh.size(axis)
            piece = piece.narrow(dim, self.mesh.get_local_rank(axis) * length, length)
        return piece

    def as_dtensor(self, part: torch.Tensor, shape: Sequence[int]) -> DTensor:
        """The logical tensor of which this rank has a part."""
        return local_tensors.from_local(part, shape, self.mesh, self.placements)


def part_of(variable: keras.Variable) -> SlotPart | None:
    """The part of a variable that this rank updates; None where slots have the variable's layout."""
    layout = keras_layout(variable)
    if layout is None or not layout.distribution.zero_stage:
        return None
    of_slots = layout.distribution.slot_layout(layout)
    if of_slots is layout or not layouts.distributed(layout.distribution.placement):
        return None
    return _between(layout.layout, of_slots.layout, at_once=layout.distribution.zero_stage > 1)


def held_part_of(variable: keras.Variable) -> SlotPart | None:
    """The part that this rank holds of what it uses of a variable (`zero=3`); None where it holds all of it."""
    layout = keras_layout(variable)
    if layout is None or layout.given.used is None or not isinstance(variable._value, DTensor):
        return None
    return _between(layout.given.used, layout.layout, at_once=True)


@functools.lru_cache(maxsize=4096)
def _between(whole: Layout, part: Layout, at_once: bool) -> SlotPart:
    own, placements = layouts.engine_layout(whole), layouts.engine_layout(part)
    axes = tuple((axis, part.dim) for axis, part in enumerate(placements) if part != own[axis])  # type: ignore[attr-defined]
    return SlotPart(layouts.mesh(whole.placement), axes, placements, at_once)


class Scatter:
    """Sums over the ranks, on their way to the ranks that keep them; all of one dtype, and split over the same axes.

    Args:
        summands: this rank's, one for each gradient.
        parts: where each goes.
        summed: axes of the mesh over which the parts are summed besides, and stay alike.
        divisor: what the sum is divided by.
        paths: the paths of the variables, for the profile.
    """

    def __init__(
        self,
        summands: Sequence[torch.Tensor],
        parts: Sequence[SlotPart],
        summed: Sequence[int] = (),
        divisor: int = 1,
        paths: Sequence[str] = (),
    ):
        self._parts, self._summed, self._paths = parts, summed, paths
        self._mesh, self._axes = parts[0].mesh, [axis for axis, _ in parts[0].axes]
        self._shapes: list[torch.Size] = []
        self._send(summands, 0, divisor)

    def _send(self, summands: Sequence[torch.Tensor], at: int, divisor: int = 1) -> None:
        count = self._mesh.size(self._axes[at])
        chunks = [each.chunk(count, part.axes[at][1]) for each, part in zip(summands, self._parts, strict=True)]
        self._shapes = [chunk[0].shape for chunk in chunks]
        flat = summands[0].new_empty(sum(each.numel() for each in summands))
        # what each rank is to have, one rank after the other
        sizes = [chunk[0].numel() for chunk in chunks] * count
        for piece, (place, chunk) in zip(flat.split(sizes), itertools.product(range(count), chunks), strict=True):
            torch.div(chunk[place], divisor, out=piece.view(chunk[place].shape))  # half precision overflows after a sum
        self._sent, self._arrived = flat, torch.empty_like(flat)
        with profiling.gradients_of(self._paths):
            # gloo's own reduce-scatter sums whole tensors on every rank
            self._work = dist.all_to_all_single(
                self._arrived, flat, group=self._mesh.get_group(self._axes[at]), async_op=True
            )

    def wait(self) -> list[torch.Tensor]:
        """This rank's part of each sum."""
        for at, axis in enumerate(self._axes):
            if at:
                self._send(pieces, at)  # noqa: F821  # of the axis before
            if self._work is not None:
                self._work.wait()
            flat = self._arrived.view(self._mesh.size(axis), -1).sum(0)
            del self._sent, self._arrived
            sizes = [shape.numel() for shape in self._shapes]
            pieces = [piece.view(shape) for piece, shape in zip(flat.split(sizes), self._shapes, strict=True)]
        for axis in self._summed:
            with profiling.gradients_of(self._paths):
                doubling.all_reduce(flat, self._mesh.get_group(axis))
        return pieces


class Scatters:
    """Scatters one after the other: the next is packed while one is on its way."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Scatter, Sequence[object]]] = []
        self.done: list[tuple[object, torch.Tensor]] = []

    def add(self, scatter: Scatter, whose: Sequence[object]) -> None:
        """Wait for an earlier one where there are too many on their way; `whose`: what `done` names each part by."""
        self._waiting.append((scatter, whose))
        if len(self._waiting) > _UNDER_WAY:
            self._wait()

    def finish(self) -> list[tuple[object, torch.Tensor]]:
        """All parts, each with its name."""
        while self._waiting:
            self._wait()
        return self.done

    def _wait(self) -> None:
        scatter, whose = self._waiting.pop(0)
        self.done += zip(whose, scatter.wait(), strict=True)


def buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of tensors of these bytes that travel together.

    Example:
        >>> list(buckets([3 << 20, 2 << 20, 1 << 20]))
        [[0, 1], [2]]
    """
    group: list[int] = []
    size = 0
    for index, each in enumerate(sizes):
        group.append(index)
        size += each
        if size >= BUCKET_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextlib.contextmanager
def held(variables: Sequence[keras.Variable], parts: Sequence[SlotPart | None]) -> Iterator[None]:
    """Inside, a variable that has a part is in its slots' layout; after it, all of its new value is on each rank."""
    split = [(variable, part) for variable, part in zip(variables, parts, strict=True) if part is not None]
    pieces = [_local(variable) for variable, _ in split]
    own = [part.cut(piece).contiguous() for piece, (_, part) in zip(pieces, split, strict=True)]
    inside = [
        (variable, part.as_dtensor(mine, variable._value.shape))
        for mine, (variable, part) in zip(own, split, strict=True)
    ]
    with holding(inside):
        yield
    by_axes: dict[tuple[object, ...], list[int]] = {}
    for index, (_, part) in enumerate(split):
        by_axes.setdefault((tuple(axis for axis, _ in part.axes), own[index].dtype), []).append(index)
    for indices in by_axes.values():
        for group in buckets([pieces[index].nbytes for index in indices]):
            chosen = [indices[place] for place in group]
            mine, into = [own[at] for at in chosen], [pieces[at] for at in chosen]
            PartsGather(mine, [split[at][1] for at in chosen], into).wait()


def _local(variable: keras.Variable) -> torch.Tensor:
    value = variable._value.detach()
    return value._local_tensor if isinstance(value, DTensor) else value


class PartsGather:
    """The parts of all ranks, on their way into these pieces: along the last axis at once, along others at `wait`."""

    def __init__(self, own: Sequence[torch.Tensor], parts: Sequence[SlotPart], into: Sequence[torch.Tensor]):
        self._parts, self._into = parts, into
        self._send(own, len(parts[0].axes) - 1)

    def _send(self, own: Sequence[torch.Tensor], at: int) -> None:
        axis, dim = self._parts[0].axes[at]
        group = self._parts[0].mesh.get_group(axis)
        self._own = own
        # rows of a single variable are gathered in place
        self._in_place = len(own) == 1 and dim == 0 and at == 0 and self._into[0].is_contiguous()
        if self._in_place:
            self._sent, self._arrived = own[0], self._into[0]
        else:
            self._sent = torch.cat([each.reshape(-1) for each in own])
            self._arrived = self._sent.new_empty(self._parts[0].mesh.size(axis) * self._sent.numel())
        self._work = dist.all_gather_single(self._arrived, self._sent, group=group, async_op=True)

    def wait(self) -> Sequence[torch.Tensor]:
        """The whole pieces."""
        for at in reversed(range(len(self._parts[0].axes))):
            if at + 1 < len(self._parts[0].axes):
                self._send(own, at)  # noqa: F821  # what came along the axis after it
            if self._work is not None:
                self._work.wait()
            if self._in_place:
                return self._into
            columns = self._arrived.view(-1, self._sent.numel()).split([each.numel() for each in self._own], dim=1)
            own = [
                torch.cat([row.view(each.shape) for row in column], part.axes[at][1])
                for column, each, part in zip(columns, self._own, self._parts, strict=True)
            ]
        for piece, whole in zip(self._into, own, strict=True):
            piece.copy_(whole)
        return self._into
