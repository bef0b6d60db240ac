"""Exchange: who holds, wants, adds and keeps the elements, for any two layouts of one logical tensor.

Every rank evaluates these roles alone, from coordinates. The messages that follow from them are in `phases.py`.

- An *atom* is the common box of a source block and a target block: all its elements have the same holders and the same
  *destinations*, the ranks of the target block.
- Where the target has a P, the destinations that differ only on its P axes form one *family*: their values must add up
  to the element. Destinations with the same coordinates on the P axes are the copies of one *member*, of which each
  family has one. Copies must end up equal (a layout promises it), so all families divide an element among their
  members in the same way. Without a P in the target each destination is a family of its own.
- An *owner* adds the summands of a range of an atom.

Example: `S(0),B -> B,P` on ranks [[0, 1], [2, 3]]. Ranks 0 and 1 hold the upper rows, 2 and 3 the lower. Families are
[0, 1] and [2, 3], members {0, 2} and {1, 3}. Both members have a copy that holds the upper rows, so the number of the
block decides: block 0 is kept by member {0, 2}, rank 2 receives it from rank 0; block 1 by member {1, 3}, rank 1
receives it from rank 3. The others keep zeros.

    >>> from keras_flow.boxing.phases import receives
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> exchange = Exchange(Layout(mesh, "S(0),B", (4, 6)), Layout(mesh, "B,P", (4, 6)))
    >>> exchange.phases, exchange.family_count
    (('move',), 2)
    >>> [(m.sender, m.receiver, m.piece.box[0]) for rank in range(4) for m in receives(exchange, rank, "move")]
    [(0, 0, (0, 2)), (3, 1, (2, 4)), (0, 2, (0, 2)), (3, 3, (2, 4))]

Limits: an atom's elements are treated alike, so a rank may receive one row or one range more than another where shapes
are uneven; which phases an exchange takes is decided for all atoms, `merge` or `reduce` atom by atom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_flow.boxing.blocks import Blocks, Box, Coords, array_of, volume
from keras_flow.boxing.messages import Piece
from keras_flow.layout import Layout, balanced
from keras_flow.placements import Placement


@dataclass(frozen=True)
class Exchange:
    """Two layouts of one shape, and the roles that ranks have in changing one into the other.

    Attributes:
        source, target: the layouts.
        apart: axes (of one common placement) that cut the ranks into groups: ranks with different coordinates on them
            send each other nothing, as in a collective along the other axes.
    """

    source: Layout
    target: Layout
    apart: tuple[int, ...] = ()

    @cached_property
    def source_blocks(self) -> Blocks:
        """The blocks of the source layout."""
        return Blocks(self.source)

    @cached_property
    def target_blocks(self) -> Blocks:
        """The blocks of the target layout."""
        return Blocks(self.target)

    @cached_property
    def same_placement(self) -> bool:
        """Whether coordinates mean the same rank on both sides."""
        before, after = self.source.placement, self.target.placement
        return before.ranks == after.ranks and before.hierarchy == after.hierarchy

    @cached_property
    def source_ranks(self) -> np.ndarray:
        """[ranks]: the ranks of the source in order."""
        return array_of(self.source.placement.ranks)

    def layout_of(self, buffer: str) -> Layout:
        """The layout whose shards have the shape of a buffer: the target for `result`, otherwise the source."""
        return self.target if buffer == "result" else self.source

    def senders(self, phase: str) -> Placement:
        """The placement of those who send in a phase."""
        return (self.target if phase == "gather" else self.source).placement

    # ---- how many

    @cached_property
    def summand_count(self) -> int:
        """Into how many summands a group's elements are divided: p in docs/boxing-spec.md; 1 where nothing is added."""
        return self.source_blocks.sizes_of(axis for axis in self.source_blocks.partial_axes if axis not in self.apart)

    @cached_property
    def family_count(self) -> int:
        """How many families want an element, which is how many copies a member has: m in docs/boxing-spec.md."""
        return self.target_blocks.sizes_of(axis for axis in self.target_blocks.copy_axes if axis not in self.apart)

    @cached_property
    def member_axes(self) -> tuple[int, ...]:
        """The target's P axes inside a group: coordinates on them name a member."""
        return tuple(axis for axis in self.target_blocks.partial_axes if axis not in self.apart)

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases that reach the fewest receipts, in order."""
        if self.summand_count == 1:
            return ("move",)
        if self.member_axes:
            # with one family it is never worse to leave every summand with the member that holds it
            return ("merge",) if self.family_count == 1 else ("merge", "reduce", "gather")
        return ("reduce", "gather") if self.family_count > 1 else ("reduce",)

    # ---- who holds, who wants

    def source_coords(self, rank: int) -> dict[int, int] | None:
        """Coordinates of a rank in the source placement; None where it is not in it."""
        return self.source_blocks.coords_of(rank) if self.source.placement.contains(rank) else None

    def holds(self, rank: int, block: Coords) -> bool:
        """Whether `rank` holds (a summand of) the source block at these coordinates."""
        coords = self.source_coords(rank)
        return coords is not None and all(coords[axis] == index for axis, index in block.items())

    def summand_of(self, rank: int) -> dict[int, int]:
        """The summand that a rank of the source holds: its coordinates on the P axes."""
        coords = self.source_blocks.coords_of(rank)
        return {axis: coords[axis] for axis in self.source_blocks.partial_axes}

    def summands(self, at: Coords, only_from: int | None = None) -> Iterator[dict[int, int]]:
        """The coordinates on the source's P axes of all summands that count for a receiver.

        Args:
            at: coordinates of the receiver in the target.
            only_from: leave out all summands but that of this rank.
        """
        blocks = self.source_blocks
        if only_from is None:
            return blocks.all_coords(blocks.partial_axes, {axis: at[axis] for axis in self.apart})
        own = self.summand_of(only_from)
        in_group = all(own[axis] == at[axis] for axis in self.apart if axis in own)
        return iter([own] if in_group else [])

    def sender(self, block: Coords, summand: Coords, receiver: int, at: Coords) -> int:
        """The rank from which `receiver`, at the target coordinates `at`, takes a summand of a source block.

        The receiver where it holds the summand; otherwise, of the copies, the one with the receiver's coordinates (on
        one placement) or the one that its position leads to, so that copies share the work of sending.
        """
        blocks = self.source_blocks
        wanted = {**block, **summand}
        if self.holds(receiver, wanted):
            return receiver
        if self.same_placement:
            copy = {axis: at[axis] for axis in blocks.copy_axes}
        else:
            position = self.target_blocks.number(tuple(at), at)
            copy = blocks.coords_of_number(blocks.copy_axes, position % blocks.copies)
        return blocks.rank_at({**wanted, **copy})

    def destinations(self, at: Coords) -> list[tuple[dict[int, int], int]]:
        """Coordinates and rank of all that want the target block at the coordinates `at`, in order."""
        blocks = self.target_blocks
        fixed = {axis: at[axis] for axis in (*blocks.split_axes, *self.apart)}
        return [
            (coords, blocks.rank_at(coords)) for coords in blocks.all_coords(tuple(range(len(blocks.sizes))), fixed)
        ]

    # ---- who adds

    def owners(self, block: Coords, at: Coords) -> list[int]:
        """The ranks that divide the sums of an atom: the destinations that hold a summand, otherwise all."""
        blocks = self.target_blocks
        # not by testing all destinations: on 65,536 ranks these may be thousands, of which few hold the block
        if self.same_placement:  # coordinates mean the same rank, so `block` names the holders among the destinations
            fixed = {axis: at[axis] for axis in (*blocks.split_axes, *self.apart)}
            if all(fixed.get(axis, index) == index for axis, index in block.items()):
                holders = blocks.all_coords(tuple(range(len(blocks.sizes))), {**fixed, **block})
                return [blocks.rank_at(coords) for coords in holders]
            return [rank for _, rank in self.destinations(at)]
        wanting = [rank for _, rank in self.destinations(at)]
        return [rank for rank in wanting if self.holds(rank, block)] or wanting

    def ranges(self, block: Coords, box: Box, at: Coords) -> dict[int, Piece]:
        """The ranges of an atom by the owner that adds them, for a receiver at the target coordinates `at`.

        They are equal, by the balanced split rule. An owner without an element is left out.
        """
        # an atom is named by its source block and its target block; groups share neither owners nor ranges
        where = tuple(at[axis] for axis in (*self.target_blocks.split_axes, *self.apart))
        key = (tuple(block.items()), where)
        if key not in self._latest_ranges:  # receivers of one atom ask one after the other
            owners, size = self.owners(block, at), volume(box)
            pieces = {owner: Piece(box, *balanced(size, len(owners), number)) for number, owner in enumerate(owners)}
            self._latest_ranges.clear()
            self._latest_ranges[key] = {owner: piece for owner, piece in pieces.items() if piece.size}
        return self._latest_ranges[key]

    @cached_property
    def _latest_ranges(self) -> dict[tuple[object, object], dict[int, Piece]]:
        return {}

    # ---- who keeps: members of a target with P

    def keeps(self, block: Coords, summand: Coords, at: Coords, number: int) -> bool:
        """Whether the receiver at the target coordinates `at` is of the member that keeps a summand of a block."""
        keeper = self._keeping_member(block, summand, at, number)
        return all(at[axis] == index for axis, index in keeper.items())

    def _keeping_member(self, block: Coords, summand: Coords, at: Coords, number: int) -> Coords:
        """The member that keeps a summand, the same in all families: coordinates on the target's P axes.

        It is the one of which most copies hold the summand already. Of several the first where all their copies do, so
        that nothing moves; else `number` decides, so that ranks share the load.
        """
        if not self.member_axes:
            return {}
        if self.same_placement:
            return self._keeping_member_on_one_placement({**block, **summand}, at, number)
        # between placements a rank's coordinates on one side say nothing about the other: count them
        counts = self._holding_copies({**block, **summand}, at)
        most = max(counts.values(), default=0)
        if not most:
            # nobody holds it, so any member may keep it: by number, which spreads blocks over the members
            members = self.target_blocks.sizes_of(self.member_axes)
            return self.target_blocks.coords_of_number(self.member_axes, number % members)
        best = sorted(member for member, count in counts.items() if count == most)
        chosen = best[0 if most == self.family_count else number % len(best)]
        return dict(zip(self.member_axes, chosen, strict=True))

    def _keeping_member_on_one_placement(self, wanted: Coords, at: Coords, number: int) -> Coords:
        """Return the keeping member in closed form: on one placement coordinates mean the same rank.

        `wanted` are the coordinates that holders have. A P axis that they name has its member's coordinate; on the
        others all members have as many holding copies.
        """
        blocks = self.target_blocks
        if any(wanted[axis] != at[axis] for axis in blocks.split_axes if axis in wanted):  # no destination holds it
            return blocks.coords_of_number(self.member_axes, number % blocks.sizes_of(self.member_axes))
        # on an axis where the source has B, each member has as many holding copies as the others
        tied = tuple(axis for axis in self.member_axes if axis not in wanted)
        if self.holding_copies == self.family_count:
            number = 0
        chosen = blocks.coords_of_number(tied, number % blocks.sizes_of(tied))
        return {axis: wanted[axis] if axis in wanted else chosen[axis] for axis in self.member_axes}

    @cached_property
    def holding_copies(self) -> int:
        """How many copies of a member hold a summand, where any of them does, on one placement."""
        source, target = self.source_blocks, self.target_blocks
        named = (*source.split_axes, *source.partial_axes)  # on these axes holders have one coordinate
        return self.family_count // target.sizes_of(
            axis for axis in target.copy_axes if axis in named and axis not in self.apart
        )

    def _holding_copies(self, wanted: Coords, at: Coords) -> dict[tuple[int, ...], int]:
        """Member -> how many of its copies hold a summand (at the source coordinates `wanted`); others are left out."""
        counts: dict[tuple[int, ...], int] = {}
        for copy in self.source_blocks.all_coords(self.source_blocks.copy_axes):
            rank = self.source_blocks.rank_at({**wanted, **copy})
            # a holder that wants nothing is no copy of any member
            if not self.target.placement.contains(rank):
                continue
            coords = self.target_blocks.coords_of(rank)
            if all(coords[axis] == at[axis] for axis in self.target_blocks.split_axes):
                member = tuple(coords[axis] for axis in self.member_axes)
                counts[member] = counts.get(member, 0) + 1
        return counts

    def merges(self, block: Coords, at: Coords) -> bool:
        """Whether an atom takes the phase `merge`, in which each summand goes to the member that keeps it.

        Without it the summands are added to one sum, which takes summand_count - 1 + family_count - 1 receipts (one
        more where no destination holds a summand); the phase takes `missing`.
        """
        if not self.member_axes:
            return False
        missing, none_held = (
            self._missing_on_one_placement(block, at) if self.same_placement else self._missing(block, at)
        )
        # equal counts are merged: the summands then go in one phase instead of two
        return missing <= self.summand_count + self.family_count - 2 + none_held

    def _missing(self, block: Coords, at: Coords) -> tuple[int, bool]:
        """Receipts that the copies of the keeping members need for an atom; whether they hold no summand of it."""
        most = [
            max(self._holding_copies({**block, **summand}, at).values(), default=0) for summand in self.summands(at)
        ]
        return self.family_count * self.summand_count - sum(most), not any(most)

    def _missing_on_one_placement(self, block: Coords, at: Coords) -> tuple[int, bool]:
        """Return what `_missing` returns, in closed form."""
        source, target = self.source_blocks, self.target_blocks
        if any(block[axis] != at[axis] for axis in target.split_axes if axis in block):
            return self.family_count * self.summand_count, True
        # the destinations hold those summands that have the target block's coordinates on its split axes
        # such an axis splits the target, so only the summand of one coordinate on it is in the block's ranks
        held = self.summand_count // source.sizes_of(
            axis for axis in source.partial_axes if axis in target.split_axes and axis not in self.apart
        )
        return self.family_count * self.summand_count - held * self.holding_copies, False
