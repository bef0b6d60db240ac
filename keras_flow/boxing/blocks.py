"""Blocks: how a layout cuts a tensor, and which ranks hold which block.

Each combination of coordinates on the split axes of a placement has one *block* of the tensor. All ranks with these
coordinates hold it: copies of it along axes with B, summands of it along axes with P.

Everything follows from coordinates and nothing is listed for all ranks, so that on a placement of 65,536 ranks the part
of one rank costs what its partners cost.

Example: on ranks [[0, 1], [2, 3]] the layout `S(0),P` cuts a tensor of 4 rows into two blocks. Ranks 2 and 3 hold
summands of the lower one.

    >>> from keras_flow.placements import Placement
    >>> blocks = Blocks(Layout(Placement([[0, 1], [2, 3]]), "S(0),P", (4, 6)))
    >>> blocks.split_axes, blocks.partial_axes, blocks.summands
    ((0,), (1,), 2)
    >>> blocks.box_at({0: 1}), [blocks.rank_at({0: 1, 1: index}) for index in range(2)]
    (((2, 4), (0, 6)), [2, 3])
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
    """Number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def intersection(first: Box, second: Box) -> Box:
    """The box that two boxes have in common; a dim in which they do not meet has length 0."""
    common: list[tuple[int, int]] = []
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        begin, end = max(start, other_start), min(stop, other_stop)
        common.append((begin, max(begin, end)))
    return tuple(common)


def local_slices(box: Box, layout: Layout, rank: int) -> tuple[slice, ...]:
    """Return where a box of the logical tensor is in the shard of a rank that holds it."""
    return tuple(
        slice(start - held.start, stop - held.start)
        for (start, stop), held in zip(box, layout.local_slices(rank), strict=True)
    )


@functools.lru_cache(maxsize=8)
def array_of(ranks: tuple[int, ...]) -> np.ndarray:
    """[ranks]: the ranks as an array, which callers share and must not write into."""
    return np.array(ranks, np.int64)


def balanced_index(length: int, parts: int, element: int) -> int:
    """The block of the balanced split rule that holds `element`: the inverse of `kf.layout.balanced`.

    Example:
        >>> [balanced_index(10, 4, element) for element in (0, 2, 3, 9)]
        [0, 0, 1, 3]
    """
    base, more = divmod(length, parts)
    # below `edge` are the blocks that have one element more
    edge = more * (base + 1)
    return element // (base + 1) if element < edge else more + (element - edge) // base


@dataclass(frozen=True)
class Blocks:
    """The blocks of a layout, and the arithmetic of coordinates on its placement."""

    layout: Layout

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the placement's axes."""
        return self.layout.placement.hierarchy

    @cached_property
    def split_axes(self) -> tuple[int, ...]:
        """The axes with S."""
        return tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if isinstance(part, Split))

    @cached_property
    def copy_axes(self) -> tuple[int, ...]:
        """The axes with B: ranks that differ only on them hold equal shards."""
        return tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if isinstance(part, Broadcast))

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """The axes with P: ranks that differ only on them hold summands of one block."""
        return tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if isinstance(part, PartialSum))

    @cached_property
    def axes_of_dim(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the axes that split it, outer first."""
        return tuple(
            tuple(axis for axis, part in enumerate(self.layout.nd_sbp) if part == Split(dim))
            for dim in range(len(self.layout.shape))
        )

    @cached_property
    def summands(self) -> int:
        """Into how many summands each element is divided: the product of the P axes' sizes."""
        return self.sizes_of(self.partial_axes)

    @cached_property
    def copies(self) -> int:
        """How many ranks hold the same values: the product of the B axes' sizes."""
        return self.sizes_of(self.copy_axes)

    def sizes_of(self, axes: Iterable[int]) -> int:
        """The product of the sizes of `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    # ---- ranks and coordinates

    def rank_at(self, coords: Coords) -> int:
        """The rank at these coordinates, one for each axis of the placement."""
        position = 0
        for axis, size in enumerate(self.sizes):
            position = position * size + coords[axis]
        return self.layout.placement.ranks[position]

    def coords_of(self, rank: int) -> dict[int, int]:
        """The coordinates of `rank` on all axes."""
        return dict(enumerate(self.layout.placement.coordinates(rank)))

    def all_coords(self, axes: tuple[int, ...], fixed: Coords | None = None) -> Iterator[dict[int, int]]:
        """All combinations of coordinates on `axes`, the last axis fastest; axes in `fixed` have that one only."""
        fixed = fixed or {}
        ranges = [(fixed[axis],) if axis in fixed else range(self.sizes[axis]) for axis in axes]
        for choice in itertools.product(*ranges):
            yield dict(zip(axes, choice, strict=True))

    def number(self, axes: Iterable[int], coords: Mapping[int, Any] | Sequence[Any]) -> Any:
        """The number of these coordinates among all on `axes`, the last axis fastest; of arrays an array of numbers."""
        value = 0
        for axis in axes:
            value = value * self.sizes[axis] + coords[axis]
        return value

    def coords_of_number(self, axes: tuple[int, ...], number: int) -> dict[int, int]:
        """The coordinates on `axes` that have this `number`: its inverse."""
        coords: dict[int, int] = {}
        for axis in reversed(axes):
            number, coords[axis] = divmod(number, self.sizes[axis])
        return coords

    # ---- blocks and boxes

    def box_at(self, coords: Coords) -> Box:
        """The block at these coordinates; only those on split axes are read."""
        box: list[tuple[int, int]] = []
        for dim, length in enumerate(self.layout.shape):
            start, stop = 0, length
            for axis in self.axes_of_dim[dim]:
                first, last = balanced(stop - start, self.sizes[axis], coords[axis])
                start, stop = start + first, start + last
            box.append((start, stop))
        return tuple(box)

    def overlapping(self, box: Box, fixed: Coords | None = None) -> Iterator[tuple[dict[int, int], Box]]:
        """The blocks that have elements in `box`.

        Args:
            box: part of the logical tensor.
            fixed: look only at blocks with these coordinates, where they name split axes.

        Yields:
            Coordinates of the block on the split axes, and the box that it has in common with `box`.
        """
        if volume(box) == 0:
            return
        dims = [list(self._overlapping_along(dim, bounds, fixed or {})) for dim, bounds in enumerate(box)]
        for choice in itertools.product(*dims):
            coords: dict[int, int] = {}
            for part, _ in choice:
                coords.update(part)
            yield coords, tuple(bounds for _, bounds in choice)

    def _overlapping_along(
        self, dim: int, bounds: tuple[int, int], fixed: Coords
    ) -> Iterator[tuple[dict[int, int], tuple[int, int]]]:
        """The blocks of one dim that meet `bounds`: coordinates of the axes that split the dim, and the common part."""

        def descend(
            axes: tuple[int, ...], start: int, stop: int, coords: dict[int, int]
        ) -> Iterator[tuple[dict[int, int], tuple[int, int]]]:
            if not axes:
                yield coords, (max(start, bounds[0]), min(stop, bounds[1]))
                return
            axis, length = axes[0], stop - start
            low = balanced_index(length, self.sizes[axis], max(bounds[0] - start, 0))
            high = balanced_index(length, self.sizes[axis], min(bounds[1], stop) - start - 1)
            indices = range(low, high + 1)
            if axis in fixed:
                # of the blocks in range at most the one that is asked for
                indices = range(fixed[axis], fixed[axis] + 1) if fixed[axis] in indices else range(0)
            for index in indices:
                first, last = balanced(length, self.sizes[axis], index)
                yield from descend(axes[1:], start + first, start + last, {**coords, axis: index})

        yield from descend(self.axes_of_dim[dim], 0, self.layout.shape[dim], {})

    def bounds_along(self, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop of all blocks along a dim, with an array dim for each axis that splits it, outer first.

        Example:
            >>> from keras_flow.placements import Placement
            >>> start, stop = Blocks(Layout(Placement([0, 1, 2, 3]), "S(0)", (10,))).bounds_along(0)
            >>> start.tolist(), stop.tolist()
            ([0, 3, 6, 8], [3, 6, 8, 10])
        """
        return _bounds(self.layout.shape[dim], tuple(self.sizes[axis] for axis in self.axes_of_dim[dim]))

    def bounds_at(self, dim: int, coords: Mapping[int, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop along a dim of the blocks at these coordinates: an array of them for each axis."""
        at = tuple(coords[axis] for axis in self.axes_of_dim[dim])
        start, stop = self.bounds_along(dim)
        return start[at], stop[at]


@functools.lru_cache(maxsize=16)
def _bounds(length_of_dim: int, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The balanced split rule, axis after axis, for all coordinates at a time."""
    start, length = np.zeros((), np.int64), np.full((), length_of_dim, np.int64)
    for size in sizes:
        base, more = (part[..., None] for part in np.divmod(length, size))
        index = np.arange(size)
        # each block of the axes before is split again: its blocks get a new, last array dim
        start, length = start[..., None] + base * index + np.minimum(index, more), base + (index < more)
    return start, start + length
