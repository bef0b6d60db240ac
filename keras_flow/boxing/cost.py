"""Counting what ranks receive without listing messages one by one: the rules of `Exchange` on numpy arrays.

For placements of many ranks. `tests/boxing/test_counting.py` compares every function with the rules themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from keras_flow.boxing.blocks import Blocks
from keras_flow.boxing.exchange import Exchange

Array = np.ndarray
#: ranks up to which messages are listed as quickly as they are counted
LISTED = 64


def total(exchange: Exchange) -> int:
    """Elements that all ranks together receive.

    Every element of an atom that some destination holds takes as many receipts as `lower_bound` says, every other one
    one more; only the held atoms are looked at one by one, and each of them has a rank of its own.
    """
    if exchange.table:
        ranks = dict.fromkeys((*exchange.source.placement.ranks, *exchange.target.placement.ranks))
        return sum(exchange.elements_received(rank, phase) for rank in ranks for phase in exchange.phases)
    at = _AtTarget(exchange)
    if exchange.summed == 1 and not exchange.has_families:
        return int((at.wanted - at.common).sum())
    source, target = exchange.of_source, exchange.of_target
    held = np.flatnonzero(at.common)
    # copies of a member that hold a summand; the member of which most do keeps it
    summand = at.atom * source.classes + at.in_source(source.partial_axes)
    free = [axis for axis in target.partial_axes if axis not in exchange.apart]
    members = target.sizes_of(free)
    member, copies = np.unique((summand * members + at.in_target(free))[held], return_counts=True)
    kept, first = np.unique(member // members, return_index=True)
    most = np.maximum.reduceat(copies, first) if held.size else copies
    first = np.unique(kept // source.classes, return_index=True)[1]
    held_by_keepers = np.add.reduceat(most, first) if held.size else most
    collected = exchange.summed + exchange.families - 2
    lacking = exchange.families * exchange.summed - held_by_keepers
    if exchange.summed == 1:
        receipts = lacking
    else:
        receipts = np.minimum(lacking, collected) if exchange.has_families else np.full_like(lacking, collected)
    volumes = at.common[held][np.unique(at.atom[held], return_index=True)[1]]
    groups = math.prod(target.sizes[axis] for axis in exchange.apart if axis not in target.split_axes)
    saved = sum(int(n) * int(volumes[receipts == n].sum()) for n in np.unique(receipts))
    return (collected + 1) * (math.prod(exchange.source.shape) * groups - int(volumes.sum())) + saved


def loads(exchange: Exchange) -> Array | None:
    """Elements that each rank of the target receives, in their order; None where there is no closed form.

    There is none with a P in the target, with shares, and where ranges of several lengths would have to be told apart.
    """
    if exchange.has_families or exchange.table:
        return None
    at = _AtTarget(exchange)
    if exchange.summed == 1:
        return at.wanted - at.common
    held = np.flatnonzero(at.common > 0)
    _, first, atom, owners = np.unique(at.atom[held], return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(atom, kind="stable")
    turn = np.empty_like(order)  # the number of each holder among those of its atom
    turn[order] = np.arange(len(order)) - np.repeat(np.cumsum(owners) - owners, owners)
    own = np.zeros_like(at.wanted)
    own[held] = _length(at.common[held], owners[atom], turn)
    # the atoms of a target cell that none of its ranks holds are divided among all of them
    there = np.bincount(at.cell[held[first]], at.common[held[first]], minlength=int(at.cell.max()) + 1)
    left = at.wanted - there.astype(np.int64)[at.cell]
    if left.any() and _smallest_atom(exchange) % exchange.families:
        return None
    owned = own + left // exchange.families
    return exchange.summed * owned - own + (at.wanted - owned)


def arrivals(exchange: Exchange, rank: int, phase: str) -> tuple[Array, Array]:
    """The senders of the messages that `rank` receives from others in a phase, and their elements; in no order."""
    if exchange.same_placement and not exchange.table:
        return _Arrivals(exchange, rank).of_phase(phase) if exchange.target.placement.contains(rank) else _none()
    parts = [part for part in exchange.receives(rank, phase) if part.sender != rank]
    return np.array([part.sender for part in parts], np.int64), np.array([part.piece.size for part in parts], np.int64)


def _none() -> tuple[Array, Array]:
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


def _length(length: Array, parts: Array | int, index: Array | int) -> Array:
    """The length of a block of the balanced split rule."""
    return length // parts + (index < length % parts)


def _begins(numbers: Array) -> Array:
    """Where in ordered numbers another one begins."""
    return np.diff(numbers, prepend=-1) != 0


def _blocks(cells: Blocks, dim: int) -> tuple[Array, Array]:
    """Start and stop of all blocks of a dim, an array dim for each axis that splits it."""
    return _cuts(cells.layout.shape[dim], tuple(cells.sizes[axis] for axis in cells.axes_of_dim[dim]))


@functools.lru_cache(maxsize=16)
def _cuts(length_: int, sizes: tuple[int, ...]) -> tuple[Array, Array]:
    start, length = np.zeros((), np.int64), np.full((), length_, np.int64)
    for size in sizes:
        base, more = (part[..., None] for part in np.divmod(length, size))
        index = np.arange(size)
        start, length = start[..., None] + base * index + np.minimum(index, more), base + (index < more)
    return start, start + length


def _blocks_at(cells: Blocks, dim: int, coords: Sequence[Array]) -> tuple[Array, Array]:
    """Start and stop along a dim of the blocks at the coordinates of many ranks."""
    place = tuple(coords[axis] for axis in cells.axes_of_dim[dim])
    start, stop = _blocks(cells, dim)
    return start[place], stop[place]


def _smallest_atom(exchange: Exchange) -> int:
    """Elements of which the volume of every atom is a multiple."""
    size = 1
    for dim, length in enumerate(exchange.source.shape):
        parts = math.lcm(exchange.source.parts_of_dim(dim), exchange.target.parts_of_dim(dim))
        size *= length // parts if length % parts == 0 else 1
    return size


class _AtTarget:
    """Arrays with an entry for each rank of the target, in order.

    Attributes:
        wanted: elements of its box.
        common: those of them that it holds itself.
        cell: number of its target cell (and group, where groups work apart).
        atom: number of the atom of its target cell and its source cell.
    """

    def __init__(self, exchange: Exchange):
        self.source, self.target = exchange.of_source, exchange.of_target
        # along each axis its coordinates, which numpy spreads over the others where they are needed
        self.come = self.to = np.indices(self.target.sizes, sparse=True)
        here: Array | bool = True
        if not exchange.same_placement:
            ranks, wanting = exchange.ranks_of_source, np.reshape(exchange.target.placement.ranks, self.target.sizes)
            order = np.argsort(ranks)
            places = order[np.minimum(np.searchsorted(ranks, wanting, sorter=order), len(ranks) - 1)]
            self.come, here = np.unravel_index(places, self.source.sizes), ranks[places] == wanting
        wanted, common = np.ones((), np.int64), np.asarray(here, np.int64)
        for dim in range(len(exchange.source.shape)):
            low, high = _blocks_at(self.source, dim, self.come)
            start, stop = _blocks_at(self.target, dim, self.to)
            wanted = wanted * (stop - start)
            common = common * np.maximum(np.minimum(stop, high) - np.maximum(start, low), 0)
        self.wanted, self.common = self._of_ranks(wanted), self._of_ranks(common)
        split, apart = self.source.split_axes, exchange.apart
        self.cell = self._of_ranks(self.target.number(dict.fromkeys((*self.target.split_axes, *apart)), self.to))
        self.atom = self.cell * self.source.sizes_of(split) + self.in_source(split)

    def _of_ranks(self, values: Array | int) -> Array:
        return np.broadcast_to(values, self.target.sizes).reshape(-1)

    def in_source(self, axes: Iterable[int]) -> Array:
        """Numbers of the coordinates on axes of the source (any, where the rank is not in it)."""
        return self._of_ranks(self.source.number(axes, self.come))

    def in_target(self, axes: Iterable[int]) -> Array:
        """Numbers of the coordinates on axes of the target."""
        return self._of_ranks(self.target.number(axes, self.to))


class _Arrivals:
    """What one rank receives, where source and target lie on one placement: all cells and summands at a time.

    Arrays have a dim for each axis of the placement on which partners differ; they are broadcast, so that only what
    depends on an axis has its length.
    """

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.rank = exchange, rank
        self.cells, self.wanting = exchange.of_source, exchange.of_target
        self.at = self.wanting.coords_of(rank)
        self.free = tuple(axis for axis in self.wanting.partial_axes if axis not in exchange.apart)  # of its family
        self.fixed = {*self.wanting.split_axes, *exchange.apart}  # what the destinations of an atom have in common
        self.member = self.wanting.number(self.free, self.at)
        self.members = self.wanting.sizes_of(self.free)
        self.index = {axis: self._along(axis, self._summands(axis)) for axis in self.cells.partial_axes}
        self.volume = self._volume()
        self.near = self._match(axis for axis in self.cells.split_axes if axis in self.fixed)
        self.merges = self._merges()

    def of_phase(self, phase: str) -> tuple[Array, Array]:
        """Senders and elements."""
        if phase in ("move", "merge"):
            return self._collected(phase)
        return {"reduce": self._reduced, "gather": self._gathered}[phase]()

    def _summands(self, axis: int) -> Array:
        return np.array([self.at[axis]]) if axis in self.exchange.apart else np.arange(self.cells.sizes[axis])

    def _along(self, axis: int, index: Array) -> Array:
        """Coordinates on an axis, along the array dim of that axis."""
        return index.reshape([-1 if one == axis else 1 for one in self.at])

    def _volume(self) -> Array:
        """Elements that source cells have in common with the rank's box, for the coordinates where there are any."""
        volume = np.ones([1] * len(self.at), np.int64)
        for dim, (low, high) in enumerate(self.wanting.box_at(self.at)):
            start, stop = _blocks(self.cells, dim)
            common = np.maximum(np.minimum(stop, high) - np.maximum(start, low), 0)
            axes = self.cells.axes_of_dim[dim]
            for place, axis in enumerate(axes):
                some = np.flatnonzero(np.moveaxis(common, place, 0).reshape(common.shape[place], -1).any(axis=1))
                common = common.take(some, place)
                self.index[axis] = self._along(axis, some)
            volume = volume * common.reshape([self.index[axis].size if axis in axes else 1 for axis in self.at])
        return volume

    def _match(self, axes: Iterable[int]) -> Array:
        """Where the coordinates on these axes are the rank's own."""
        found = np.ones([1] * len(self.at), bool)
        for axis in axes:
            found = found & (self.index[axis] == self.at[axis])
        return found

    def _merges(self) -> Array:
        exchange = self.exchange
        if not exchange.has_families:
            return np.zeros([1] * len(self.at), bool)
        cell = {axis: self.at[axis] for axis in self.cells.split_axes}
        nowhere = exchange.families * exchange.summed <= exchange.summed + exchange.families - 1
        return np.where(self.near, exchange.merges(cell, self.at), nowhere)

    def _messages(self, mask: Array, sizes: Array, coords: Mapping[int, Array | int]) -> tuple[Array, Array]:
        place = self.cells.number(self.at, {**self.at, **coords})
        mask, sizes, place = np.broadcast_arrays(mask & (sizes > 0), sizes, place)
        return self.exchange.ranks_of_source[place[mask]], sizes[mask]

    def _collected(self, phase: str) -> tuple[Array, Array]:
        """Blocks or summands that the rank's member keeps and the rank lacks."""
        number = self.cells.number(self.cells.split_axes, self.index)
        if phase == "merge":
            number = number + self.cells.number(self.cells.partial_axes, self.index)
        # where the target cell has holders, they are of the member with the summand's coordinates
        here = self._match(axis for axis in self.index if axis in self.fixed)
        tied = tuple(axis for axis in self.free if axis not in self.index)
        everywhere = self.exchange.copies_that_hold == self.exchange.families
        turn = 0 if everywhere else number % self.wanting.sizes_of(tied)
        chosen = self._match(axis for axis in self.free if axis in self.index) & (
            turn == self.wanting.number(tied, self.at)
        )
        mine = np.where(here, chosen, number % self.members == self.member) & ~self._match(self.index)
        return self._messages(mine & self.merges if phase == "merge" else mine, self.volume, self.index)

    def _reduced(self) -> tuple[Array, Array]:
        """The other summands of the ranges that the rank owns."""
        among = tuple(axis for axis in self.at if axis not in self.fixed)
        holding = tuple(axis for axis in among if axis not in self.cells.split_axes)
        own, dealt = (
            _length(self.volume, self.wanting.sizes_of(axes), self.wanting.number(axes, self.at))
            for axes in (holding, among)
        )
        sizes = np.where(self.near, self._match(self.cells.split_axes) * own, dealt)
        return self._messages(~self._match(self.index) & ~self.merges, sizes, self.index)

    def _gathered(self) -> tuple[Array, Array]:
        """The ranges of the other copies of the rank's member."""
        among = tuple(axis for axis in self.at if axis not in self.fixed)
        holding = tuple(axis for axis in among if axis not in self.cells.split_axes)
        found = []
        # owners that hold the cell have its coordinates; where nobody does, all destinations own
        for axes, chosen in ((holding, self.near), (among, ~self.near)):
            place = np.nonzero((self.volume > 0) & chosen & ~self.merges)
            number = np.arange(self.wanting.sizes_of(axes))
            owner = {
                axis: self.index[axis].reshape(-1)[place[axis]][:, None]
                for axis in among
                if axis in self.cells.split_axes
            }
            if axes:
                lengths = [self.wanting.sizes[axis] for axis in axes]
                owner |= dict(zip(axes, np.unravel_index(number, lengths), strict=True))
            away, same_member = np.zeros((1, 1), bool), np.ones((1, 1), bool)
            for axis in among:
                if axis in self.free:
                    same_member = same_member & (owner[axis] == self.at[axis])
                else:
                    away = away | (owner[axis] != self.at[axis])
            sizes = _length(self.volume[place][:, None], len(number), number)
            found.append(self._messages(away & same_member, sizes, owner))
        senders, sizes = zip(*found, strict=True)
        return np.concatenate(senders), np.concatenate(sizes)
