"""Blocks: the blocks into which a layout cuts a tensor, and the ranks that hold each block.

Everything is a function of coordinates: nothing is listed for all ranks, so that a placement of 65,536 ranks costs what
one rank's partners cost.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from keras_flow.layout import Layout, balanced
from keras_flow.sbp import Broadcast, PartialSum, Split

#: start and stop for each dim of the logical tensor
Box = tuple[tuple[int, int], ...]
#: coordinates on some axes of a placement: axis number -> index
Coords = Mapping[int, int]


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(stop - start for start, stop in box)


@functools.lru_cache(maxsize=8)
def array_of(ranks: tuple[int, ...]) -> np.ndarray:
    """[ranks]: the ranks as an array, which is not to be written into."""
    return np.array(ranks, np.int64)


def intersection(one: Box, other: Box) -> Box:
    """The common box; a dim without common elements has length 0."""
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = max(a, c), min(b, d)
        common.append((start, max(start, stop)))
    return tuple(common)


def balanced_index(length: int, parts: int, element: int) -> int:
    """The block of the balanced split rule that holds `element`: the inverse of `kf.layout.balanced`.

    Example:
        >>> [balanced_index(10, 4, element) for element in (0, 2, 3, 9)]
        [0, 0, 1, 3]
    """
    base, more = divmod(length, parts)
    edge = more * (base + 1)
    return element // (base + 1) if element < edge else more + (element - edge) // base


@dataclass(frozen=True)
class Blocks:
    """A layout seen as cells: one for each combination of coordinates on its split axes.

    All ranks of a cell hold the same box; those that differ on a *copy* axis (B) hold the same values, those that
    differ on a *class* axis (P) hold summands.
    """

    layout: Layout

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The hierarchy of the placement."""
        return self.layout.placement.hierarchy

    @cached_property
    def split_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if isinstance(part, Split))

    @cached_property
    def copy_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if isinstance(part, Broadcast))

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if isinstance(part, PartialSum))

    @cached_property
    def axes_of_dim(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the axes that split it, outer first."""
        return tuple(
            tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if part == Split(dim))
            for dim in range(len(self.layout.shape))
        )

    @cached_property
    def classes(self) -> int:
        """Number of summands of each element: the product of the P axes' sizes."""
        return self.sizes_of(self.partial_axes)

    @cached_property
    def copies(self) -> int:
        """Number of ranks that hold the same values: the product of the B axes' sizes."""
        return self.sizes_of(self.copy_axes)

    def sizes_of(self, axes: Iterable[int]) -> int:
        """How many coordinates there are on `axes`: the product of their sizes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def rank_at(self, coords: Coords) -> int:
        """The rank at these coordinates, one for each axis of the placement."""
        position = 0
        for axis, size in enumerate(self.sizes):
            position = position * size + coords[axis]
        return self.layout.placement.ranks[position]

    def coords_of(self, rank: int) -> dict[int, int]:
        """The coordinates of `rank` on all axes."""
        return dict(enumerate(self.layout.placement.coordinates(rank)))

    def box_at(self, coords: Coords) -> Box:
        """The box of the cell at these coordinates (those on the split axes are read)."""
        box = []
        for dim, length in enumerate(self.layout.shape):
            start, stop = 0, length
            for axis in self.axes_of_dim[dim]:
                first, last = balanced(stop - start, self.sizes[axis], coords[axis])
                start, stop = start + first, start + last
            box.append((start, stop))
        return tuple(box)

    def overlapping(self, box: Box, fixed: Coords | None = None) -> Iterator[tuple[dict[int, int], Box]]:
        """The cells that have elements in `box`: coordinates on the split axes, and the common box.

        Args:
            box: part of the logical tensor.
            fixed: only cells with these coordinates, where they name split axes.
        """
        if volume(box) == 0:
            return
        dims = [list(self._of_dim(dim, bounds, fixed or {})) for dim, bounds in enumerate(box)]
        for choice in itertools.product(*dims):
            coords: dict[int, int] = {}
            for part, _ in choice:
                coords.update(part)
            yield coords, tuple(bounds for _, bounds in choice)

    def _of_dim(
        self, dim: int, bounds: tuple[int, int], fixed: Coords
    ) -> Iterator[tuple[dict[int, int], tuple[int, int]]]:
        """The blocks of one dim that meet `bounds`: coordinates of the axes that split the dim, and the common part."""

        def descend(axes: tuple[int, ...], start: int, stop: int, coords: dict[int, int]):
            if not axes:
                yield coords, (max(start, bounds[0]), min(stop, bounds[1]))
                return
            axis, length = axes[0], stop - start
            low = balanced_index(length, self.sizes[axis], max(bounds[0] - start, 0))
            high = balanced_index(length, self.sizes[axis], min(bounds[1], stop) - start - 1)
            wanted = range(low, high + 1)
            if axis in fixed:
                wanted = range(fixed[axis], fixed[axis] + 1) if fixed[axis] in wanted else range(0)
            for index in wanted:
                first, last = balanced(length, self.sizes[axis], index)
                yield from descend(axes[1:], start + first, start + last, {**coords, axis: index})

        yield from descend(self.axes_of_dim[dim], 0, self.layout.shape[dim], {})

    def spread(self, axes: tuple[int, ...], fixed: Coords | None = None) -> Iterator[dict[int, int]]:
        """All coordinates on `axes`, first axis slowest; `fixed` holds some of them."""
        fixed = fixed or {}
        ranges = [(fixed[axis],) if axis in fixed else range(self.sizes[axis]) for axis in axes]
        for choice in itertools.product(*ranges):
            yield dict(zip(axes, choice, strict=True))

    def numbered(self, axes: tuple[int, ...], number: int) -> dict[int, int]:
        """The coordinates on `axes` whose number, first axis slowest, is `number`."""
        coords = {}
        for axis in reversed(axes):
            number, coords[axis] = divmod(number, self.sizes[axis])
        return coords

    def number(self, axes: Iterable[int], coords: Mapping[int, Any] | Sequence[Any]) -> Any:
        """The number of these coordinates among all on `axes`, first axis slowest; numbers where they are arrays."""
        value = 0
        for axis in axes:
            value = value * self.sizes[axis] + coords[axis]
        return value

    def ranges(self, box: Box) -> list[range]:
        """For each axis the coordinates among which those of all cells with elements in `box` are."""
        found = [range(size) for size in self.sizes]
        for dim, (first, last) in enumerate(box):
            start, stop = 0, self.layout.shape[dim]
            for axis in self.axes_of_dim[dim]:
                low = balanced_index(stop - start, self.sizes[axis], max(first - start, 0))
                high = balanced_index(stop - start, self.sizes[axis], min(last, stop) - start - 1)
                found[axis] = range(low, high + 1)
                if low != high:
                    break
                start, stop = (start + bound for bound in balanced(stop - start, self.sizes[axis], low))
        return found

    def congruent(self, ranges: Sequence[range], remainder: int, modulus: int) -> Iterator[dict[int, int]]:
        """Coordinates on all axes, within ranges, whose number leaves a remainder; from the last axis to the first.

        On each axis only those are tried with which the axes before it can reach the remainder.
        """

        def descend(axis: int, stride: int, left: int) -> Iterator[dict[int, int]]:
            if axis < 0:
                yield {}
                return
            outer = math.gcd(stride * self.sizes[axis], modulus) if axis else modulus
            common = math.gcd(stride, outer)
            step = outer // common
            fits = left // common * pow(stride // common, -1, step) % step
            wanted = ranges[axis]
            for index in range(wanted.start + (fits - wanted.start) % step, wanted.stop, step):
                for rest in descend(axis - 1, stride * self.sizes[axis], left - index * stride):
                    yield {**rest, axis: index}

        yield from descend(len(self.sizes) - 1, 1, remainder)
