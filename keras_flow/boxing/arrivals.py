"""Arrivals: senders and sizes of the messages that one rank receives, as arrays instead of one by one.

The rules of `phases.py`, evaluated for all source blocks and summands at a time, for placements of many ranks. Arrays
have a dim for each axis of the placement, of length 1 where partners do not differ on it; numpy broadcasts them, so
that only what depends on an axis has its length.

Example: rank 3 of 2x2 in `S(0),S(1) -> B,B`, an all-gather of blocks of 4 elements.

    >>> from keras_flow.layout import Layout
    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> senders, sizes = arrivals(Exchange(Layout(mesh, "S(0),S(1)", (4, 4)), Layout(mesh, "B,B", (4, 4))), 3, "move")
    >>> senders.tolist(), sizes.tolist()
    ([0, 1, 2], [4, 4, 4])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np

from keras_flow.boxing.cost import block_length
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.phases import receives

Array = np.ndarray
#: ranks up to which listing a rank's messages is as quick as these arrays; both give the same
LISTED = 64


def arrivals(exchange: Exchange, rank: int, phase: str) -> tuple[Array, Array]:
    """The senders of the messages that `rank` receives from others in a phase, and their elements; in no order.

    Between placements they are listed by `phases.receives`.
    """
    if exchange.same_placement:
        if exchange.target.placement.contains(rank):
            return _Arrivals(exchange, rank).of_phase(phase)
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    messages = [message for message in receives(exchange, rank, phase) if message.sender != rank]
    senders, sizes = [message.sender for message in messages], [message.piece.size for message in messages]
    return np.array(senders, np.int64), np.array(sizes, np.int64)


def message_sizes(exchange: Exchange, rank: int, phase: str) -> list[int]:
    """Elements of the messages that `rank` receives from others in a phase, in no order."""
    if exchange.source.placement.size > LISTED:
        return arrivals(exchange, rank, phase)[1].tolist()
    return [message.piece.size for message in receives(exchange, rank, phase) if message.sender != rank]


class _Arrivals:
    """The elements that one rank receives, where source and target are on one placement."""

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.rank = exchange, rank
        self.source, self.target = exchange.source_blocks, exchange.target_blocks
        self.at = self.target.coords_of(rank)
        # axes on which the destinations of an atom have the same coordinates
        self.fixed = {*self.target.split_axes, *exchange.apart}
        self.member = self.target.number(exchange.member_axes, self.at)
        # index: for each of the source's split and P axes the coordinates of blocks and summands that count
        self.index = {axis: self._along(axis, self._summands(axis)) for axis in self.source.partial_axes}
        self.volume = self._volume()
        self.is_near = self._match(axis for axis in self.source.split_axes if axis in self.fixed)
        self.merges = self._merges()

    def of_phase(self, phase: str) -> tuple[Array, Array]:
        """Senders and elements of a phase's messages."""
        if phase in ("move", "merge"):
            return self._kept(phase)
        return {"reduce": self._reduced, "gather": self._gathered}[phase]()

    def _summands(self, axis: int) -> Array:
        return np.array([self.at[axis]]) if axis in self.exchange.apart else np.arange(self.source.sizes[axis])

    def _along(self, axis: int, index: Array) -> Array:
        """Coordinates on an axis, along the array dim of that axis."""
        return index.reshape([-1 if other == axis else 1 for other in self.at])

    def _volume(self) -> Array:
        """Elements that source blocks have in common with the rank's target block.

        Coordinates for which there are none at all are left out of `index`, so that arrays are as long as the rank has
        partners.
        """
        volume = np.ones([1] * len(self.at), np.int64)
        for dim, (wanted_start, wanted_stop) in enumerate(self.target.box_at(self.at)):
            start, stop = self.source.bounds_along(dim)
            common = np.maximum(np.minimum(stop, wanted_stop) - np.maximum(start, wanted_start), 0)
            axes = self.source.axes_of_dim[dim]
            for position, axis in enumerate(axes):
                by_coordinate = np.moveaxis(common, position, 0).reshape(common.shape[position], -1)
                # a coordinate is left out if no block at it meets the rank's block, whatever the other axes have
                some = np.flatnonzero(by_coordinate.any(axis=1))
                common = common.take(some, position)
                self.index[axis] = self._along(axis, some)
            volume = volume * common.reshape([self.index[axis].size if axis in axes else 1 for axis in self.at])
        return volume

    def _match(self, axes: Iterable[int]) -> Array:
        """Return where the coordinates on these axes are the rank's own."""
        matches = np.ones([1] * len(self.at), bool)
        for axis in axes:
            matches = matches & (self.index[axis] == self.at[axis])
        return matches

    def _merges(self) -> Array:
        """`Exchange.merges` for all blocks: it has one answer for those that destinations hold, one for the others."""
        exchange = self.exchange
        if not exchange.member_axes:
            return np.zeros([1] * len(self.at), bool)
        own_block = {axis: self.at[axis] for axis in self.source.split_axes}
        summands, families = exchange.summand_count, exchange.family_count
        # where no destination holds a summand, `merge` takes p m receipts, one sum p - 1 + m - 1 and one more
        return np.where(
            self.is_near, exchange.merges(own_block, self.at), families * summands <= summands + families - 1
        )

    def _messages(self, mask: Array, sizes: Array, coords: Mapping[int, Array | int]) -> tuple[Array, Array]:
        """Senders at `coords` (the rank's own where they say nothing) and sizes, where `mask` and not empty."""
        position = self.source.number(self.at, {**self.at, **coords})
        mask, sizes, position = np.broadcast_arrays(mask & (sizes > 0), sizes, position)
        return self.exchange.source_ranks[position[mask]], sizes[mask]

    def _kept(self, phase: str) -> tuple[Array, Array]:
        """Blocks (`move`) or summands (`merge`) that the rank's member keeps and the rank does not hold.

        The arrays of `Exchange._keeping_member_on_one_placement`.
        """
        member_axes = self.exchange.member_axes
        # the number that decides among members, as in `phases._move` and `phases._merge`
        number = self.source.number(self.source.split_axes, self.index)
        if phase == "merge":
            number = number + self.source.number(self.source.partial_axes, self.index)
        held_here = self._match(axis for axis in self.index if axis in self.fixed)
        tied = tuple(axis for axis in member_axes if axis not in self.index)
        all_hold = self.exchange.holding_copies == self.exchange.family_count
        turn = 0 if all_hold else number % self.target.sizes_of(tied)
        is_keeper = self._match(axis for axis in member_axes if axis in self.index) & (
            turn == self.target.number(tied, self.at)
        )
        by_turn = number % self.target.sizes_of(member_axes) == self.member
        kept = cast(Array, np.where(held_here, is_keeper, by_turn)) & ~self._match(self.index)
        return self._messages(kept & self.merges if phase == "merge" else kept, self.volume, self.index)

    def _reduced(self) -> tuple[Array, Array]:
        """The other summands of the ranges that the rank owns."""
        destinations = tuple(axis for axis in self.at if axis not in self.fixed)
        holders = tuple(axis for axis in destinations if axis not in self.source.split_axes)
        # its range of an atom that it holds, and of one that no destination does
        held, dealt = (
            block_length(self.volume, self.target.sizes_of(axes), self.target.number(axes, self.at))
            for axes in (holders, destinations)
        )
        # an atom that destinations hold is owned by those with its coordinates: by this rank, or not by it at all
        sizes = np.where(self.is_near, self._match(self.source.split_axes) * held, dealt)
        return self._messages(~self._match(self.index) & ~self.merges, sizes, self.index)

    def _gathered(self) -> tuple[Array, Array]:
        """The ranges of the other owners that are copies of the rank's member."""
        destinations = tuple(axis for axis in self.at if axis not in self.fixed)
        holders = tuple(axis for axis in destinations if axis not in self.source.split_axes)
        parts: list[tuple[Array, Array]] = []
        # owners of an atom that destinations hold have its coordinates; where none does, all destinations own
        for axes, chosen in ((holders, self.is_near), (destinations, ~self.is_near)):
            atoms = np.nonzero((self.volume > 0) & chosen & ~self.merges)
            number = np.arange(self.target.sizes_of(axes))
            # coordinates of owners [atoms, owners of an atom]
            owner = {
                axis: self.index[axis].reshape(-1)[atoms[axis]][:, None]
                for axis in destinations
                if axis in self.source.split_axes
            }
            if axes:
                lengths = [self.target.sizes[axis] for axis in axes]
                owner |= dict(zip(axes, np.unravel_index(number, lengths), strict=True))
            # a rank receives nothing from itself, and from owners of other members neither
            is_other, same_member = np.zeros((1, 1), bool), np.ones((1, 1), bool)
            for axis in destinations:
                if axis in self.exchange.member_axes:
                    same_member = same_member & (owner[axis] == self.at[axis])
                else:
                    is_other = is_other | (owner[axis] != self.at[axis])
            sizes = block_length(self.volume[atoms][:, None], len(number), number)
            parts.append(self._messages(is_other & same_member, sizes, owner))
        senders, sizes = zip(*parts, strict=True)
        return np.concatenate(senders), np.concatenate(sizes)
