"""The exchange of slices: who sends which elements to whom, for any two layouts of one logical tensor.

An *atom* is the common box of a source cell and a target cell; all its elements have the same holders and the same
destinations. What follows is decided atom by atom, by rules that every rank can evaluate alone:

- `move`: no P in the source. A rank that holds an element keeps it; any other receives it once.
- `reduce`: P in the source. The atom is cut into equal ranges, one for each *owner*: the destinations that hold a
  summand, else all destinations. An owner receives the other summands of its range.
- `combine`, before `reduce`, where a table of shares says so: a *merger*, a holder that is not the owner, adds the
  summands of a range except the owner's own, and the owner receives the sum from it. It takes the same bytes, and
  load from the owners (`keras_flow.boxing.load_balance`).
- `gather`: after `reduce`. Every destination receives the ranges of the other owners.
- `merge`: P in source and target, for atoms where it takes fewer receipts than `reduce` and `gather`. Each summand is
  kept by one *member*, the one of which most copies hold it.

Where the target has a P, ranks that differ on its P axes form one *family*: their values must add up to the element.
Ranks with the same coordinates on the P axes are one *member*, of which each family has a copy. A layout is a promise:
ranks that differ only on a B axis hold equal shards. So all families divide an element among their members in the same
way.

Example, `S(0),B -> B,P` on ranks [[0, 1], [2, 3]]: ranks 0 and 1 hold the upper rows, 2 and 3 the lower. Families are
[0, 1] and [2, 3], members {0, 2} and {1, 3}. The upper rows are held by a copy of either member, so the rows' number
decides: cell 0 is kept by member {0, 2}, rank 2 receives it from rank 0; cell 1 by member {1, 3}, rank 1 receives it
from rank 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from keras_flow.boxing.blocks import Blocks, Box, Coords, array_of, intersection, volume
from keras_flow.boxing.messages import Lacking, Message, Piece, Share, Shares, whole
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, balanced
from keras_flow.placements import Placement


@dataclass(frozen=True)
class Exchange:
    """The rules for one pair of layouts of one shape.

    `apart` are axes (of one common placement) on which every coordinate works for itself: what a collective in the
    groups of the other axes does. `table` holds shares for atoms that do not follow the rule of equal ranges.
    """

    source: Layout
    target: Layout
    apart: tuple[int, ...] = ()
    table: Mapping[Box, tuple[Share, ...]] = field(default_factory=dict, hash=False)

    @cached_property
    def of_source(self) -> Blocks:
        return Blocks(self.source)

    @cached_property
    def of_target(self) -> Blocks:
        return Blocks(self.target)

    @cached_property
    def same_placement(self) -> bool:
        """Whether coordinates mean the same rank on both sides."""
        one, other = self.source.placement, self.target.placement
        return one.ranks == other.ranks and one.hierarchy == other.hierarchy

    @cached_property
    def ranks_of_source(self) -> np.ndarray:
        """[ranks]: the ranks of the source in order."""
        return array_of(self.source.placement.ranks)

    def layout_of(self, buffer: str) -> Layout:
        """What a buffer of the executors lies as: `result` as the target, `source` and `combined` as the source."""
        return self.target if buffer == "result" else self.source

    def holders(self, phase: str) -> Placement:
        """The placement of those who send in a phase."""
        return (self.target if phase == "gather" else self.source).placement

    # who holds, who wants ------------------------------------------------------------------------------------------

    def coords_in_source(self, rank: int) -> dict[int, int] | None:
        """Coordinates of a rank in the source placement, None where it is not in it."""
        return self.of_source.coords_of(rank) if self.source.placement.contains(rank) else None

    def holds(self, rank: int, cell: Coords) -> bool:
        """Whether `rank` holds (a summand of) the source cell."""
        coords = self.coords_in_source(rank)
        return coords is not None and all(coords[axis] == index for axis, index in cell.items())

    def sender(self, cell: Coords, summand: Coords, receiver: int, at: Coords) -> int:
        """The rank from which `receiver` (at target coordinates `at`) takes a summand of a cell: itself if it can."""
        cells = self.of_source
        own = self.coords_in_source(receiver)
        wanted = {**cell, **summand}
        if own is not None and all(own[axis] == index for axis, index in wanted.items()):
            return receiver
        if self.same_placement:
            copy = {axis: at[axis] for axis in cells.copy_axes}
        else:
            copy = cells.numbered(cells.copy_axes, self.of_target.number(tuple(at), at) % cells.copies)
        return cells.rank_at({**wanted, **copy})

    def destinations(self, at: Coords) -> list[tuple[dict[int, int], int]]:
        """Coordinates and rank of all that want the target cell of the coordinates `at`, in order."""
        cells = self.of_target
        fixed = {axis: at[axis] for axis in (*cells.split_axes, *self.apart)}
        found = []
        for coords in cells.spread(tuple(range(len(cells.sizes))), fixed):
            found.append((coords, cells.rank_at(coords)))
        return found

    def owners(self, cell: Coords, at: Coords) -> list[int]:
        """The ranks among which the summation of an atom (source cell, target coordinates) is divided."""
        cells = self.of_target
        if self.same_placement:  # coordinates mean the same rank: those that hold the cell are named by it
            fixed = {axis: at[axis] for axis in (*cells.split_axes, *self.apart)}
            if all(fixed.get(axis, index) == index for axis, index in cell.items()):
                every = cells.spread(tuple(range(len(cells.sizes))), {**fixed, **cell})
                return [cells.rank_at(coords) for coords in every]
            return [rank for _, rank in self.destinations(at)]
        wanting = [rank for _, rank in self.destinations(at)]
        return [rank for rank in wanting if self.holds(rank, cell)] or wanting

    def summands(self, at: Coords, only: int | None = None) -> Iterator[dict[int, int]]:
        """The coordinates on the source's P axes of all summands that count for a receiver at `at`.

        `only`: just the one that this rank of the source holds.
        """
        cells = self.of_source
        if only is None:
            return cells.spread(cells.partial_axes, {axis: at[axis] for axis in self.apart})
        own = self.summand_of(only)
        fits = all(own[axis] == at[axis] for axis in self.apart if axis in own)
        return iter([own] if fits else [])

    # the rules, for one atom and one receiver ------------------------------------------------------------------------

    def received(
        self, phase: str, cell: Coords, box: Box, rank: int, at: Coords, only: int | None = None
    ) -> Iterator[Message]:
        """What `rank`, at the target coordinates `at`, receives or takes from itself of an atom.

        `only`: just what may come from this rank (what comes from others may be among it).
        """
        yield from getattr(self, f"_{phase}")(cell, box, rank, at, only)

    def _member(self, cell: Coords, summand: Coords, at: Coords, number: int) -> Coords:
        """The member that keeps a summand of a cell, the same in all families: coordinates on the target's P axes.

        It is the one of which most copies hold the summand. Of several the first where all their copies hold it, so
        that nothing moves, else the one that `number` leads to, so that the load is spread.
        """
        free = tuple(axis for axis in self.of_target.partial_axes if axis not in self.apart)
        if not free:
            return {}
        if self.same_placement:
            return self._member_on_one_placement(free, {**cell, **summand}, at, number)
        counts = self._copies_of_members(free, {**cell, **summand}, at)
        most = max(counts.values(), default=0)
        if not most:
            return self.of_target.numbered(free, number % self.of_target.sizes_of(free))
        best = sorted(member for member, count in counts.items() if count == most)
        return dict(zip(free, best[0 if most == self.families else number % len(best)], strict=True))

    def _member_on_one_placement(self, free: tuple[int, ...], wanted: Coords, at: Coords, number: int) -> Coords:
        """The same in closed form: on one placement coordinates mean the same rank."""
        cells = self.of_target
        if any(wanted[axis] != at[axis] for axis in cells.split_axes if axis in wanted):  # nobody here holds it
            return cells.numbered(free, number % cells.sizes_of(free))
        tied = tuple(axis for axis in free if axis not in wanted)
        if self.copies_that_hold == self.families:
            number = 0
        chosen = cells.numbered(tied, number % cells.sizes_of(tied))
        return {axis: wanted[axis] if axis in wanted else chosen[axis] for axis in free}

    @cached_property
    def copies_that_hold(self) -> int:
        """How many copies of a member hold a summand that any of them holds, on one placement."""
        source, target = self.of_source, self.of_target
        known = (*source.split_axes, *source.partial_axes)
        return self.families // target.sizes_of(
            axis for axis in target.copy_axes if axis in known and axis not in self.apart
        )

    def _copies_of_members(self, free: tuple[int, ...], wanted: Coords, at: Coords) -> dict[tuple[int, ...], int]:
        """Member -> how many of its copies hold a summand, of the members of which any does."""
        counts: dict[tuple[int, ...], int] = {}
        for copy in self.of_source.spread(self.of_source.copy_axes):
            rank = self.of_source.rank_at({**wanted, **copy})
            if not self.target.placement.contains(rank):
                continue
            coords = self.of_target.coords_of(rank)
            if all(coords[axis] == at[axis] for axis in self.of_target.split_axes):
                member = tuple(coords[axis] for axis in free)
                counts[member] = counts.get(member, 0) + 1
        return counts

    def _move(self, cell: Coords, box: Box, rank: int, at: Coords, only: int | None) -> Iterator[Message]:
        number = self.of_source.number(self.of_source.split_axes, cell)
        for summand in self.summands(at, only):  # one: where P is not changed, the summand of the group
            if all(at[axis] == index for axis, index in self._member(cell, summand, at, number).items()):
                yield Message(self.sender(cell, summand, rank, at), rank, whole(box))

    def shares(self, cell: Coords, box: Box, at: Coords) -> Shares:
        """How the sums of an atom are divided, for a receiver at the target coordinates `at`."""
        where = tuple(at[axis] for axis in (*self.of_target.split_axes, *self.apart))
        key = (tuple(cell.items()), where)
        if self._remembered.get("key") != key:  # receivers of one atom ask one after the other
            if box in self.table:
                made = self.table[box]
            else:
                owners, size = self.owners(cell, at), volume(box)
                pieces = (Piece(box, *balanced(size, len(owners), number)) for number in range(len(owners)))
                made = tuple(
                    Share(owner, owner, piece) for owner, piece in zip(owners, pieces, strict=True) if piece.size
                )
            self._remembered.update(key=key, shares=Shares.of(made))
        return self._remembered["shares"]

    @cached_property
    def _remembered(self) -> dict:
        """The shares asked for last."""
        return {}

    def merges(self, cell: Coords, at: Coords) -> bool:
        """Whether each summand of an atom moves to the member that keeps it, instead of into one sum."""
        if not self.has_families:
            return False
        lacking = self._lacking_on_one_placement(cell, at) if self.same_placement else self._lacking(cell, at)
        return lacking.total <= self.summed + self.families - 2 + lacking.everything

    def _lacking(self, cell: Coords, at: Coords) -> Lacking:
        """What the members that keep an atom's summands lack of them."""
        free = tuple(axis for axis in self.of_target.partial_axes if axis not in self.apart)
        most = [
            max(self._copies_of_members(free, {**cell, **summand}, at).values(), default=0)
            for summand in self.summands(at)
        ]
        return Lacking(self.families * self.summed - sum(most), not any(most))

    def _lacking_on_one_placement(self, cell: Coords, at: Coords) -> Lacking:
        """The same in closed form: on one placement coordinates mean the same rank."""
        source, target = self.of_source, self.of_target
        if any(cell[axis] != at[axis] for axis in target.split_axes if axis in cell):
            return Lacking(self.families * self.summed, True)
        # of the summands those with the target cell's own coordinates on its split axes are held there
        here = self.summed // source.sizes_of(
            axis for axis in source.partial_axes if axis in target.split_axes and axis not in self.apart
        )
        return Lacking(self.families * self.summed - here * self.copies_that_hold, False)

    def _reduce(self, cell: Coords, box: Box, rank: int, at: Coords, only: int | None) -> Iterator[Message]:
        if self.merges(cell, at):
            return
        for share in self.shares(cell, box, at).owned.get(rank, ()):
            if share.merger == rank:
                for summand in self.summands(at, only if only is not None and self.holds(only, cell) else None):
                    yield Message(self.sender(cell, summand, rank, at), rank, share.piece)
            else:
                if self.holds(rank, cell):
                    yield Message(rank, rank, share.piece)
                yield Message(share.merger, rank, share.piece, "combined")

    def _combine(self, rank: int) -> Iterator[Message]:
        """What a merger receives or adds of its own; the table lists all mergers that are not owners."""
        for shares in self.table.values():
            for share in shares:
                if share.merger != rank or share.owner == rank:
                    continue
                own = self.of_source.coords_of(rank)
                cell = {axis: own[axis] for axis in self.of_source.split_axes}
                copy = {axis: own[axis] for axis in self.of_source.copy_axes}
                left_out = self.summand_of(share.owner) if self.holds(share.owner, cell) else None
                for summand in self.of_source.spread(self.of_source.partial_axes):
                    if summand != left_out:
                        yield Message(self.of_source.rank_at({**cell, **copy, **summand}), rank, share.piece)

    def summand_of(self, rank: int) -> dict[int, int]:
        """The coordinates on the P axes of a rank of the source: which summand it holds."""
        coords = self.of_source.coords_of(rank)
        return {axis: coords[axis] for axis in self.of_source.partial_axes}

    def _gather(self, cell: Coords, box: Box, rank: int, at: Coords, only: int | None) -> Iterator[Message]:
        if self.merges(cell, at):
            return
        shares = self.shares(cell, box, at)
        for share in shares.all if only is None else shares.owned.get(only, ()):
            # an owner has its range already: it is the one of its family that keeps the value
            if share.owner != rank and self._keeper(share.owner, at) == rank:
                yield Message(share.owner, rank, share.piece, "result")

    def _keeper(self, owner: int, at: Coords) -> int:
        """The rank of the family at `at` that keeps a range: the copy of its owner's member."""
        cells = self.of_target
        coords = cells.coords_of(owner)
        return cells.rank_at({**at, **{axis: coords[axis] for axis in cells.partial_axes if axis not in self.apart}})

    def _merge(self, cell: Coords, box: Box, rank: int, at: Coords, only: int | None) -> Iterator[Message]:
        if not self.merges(cell, at):
            return
        cells = self.of_source
        for summand in self.summands(at, only):
            number = cells.number(cells.split_axes, cell) + cells.number(cells.partial_axes, summand)
            if all(at[axis] == index for axis, index in self._member(cell, summand, at, number).items()):
                yield Message(self.sender(cell, summand, rank, at), rank, whole(box))

    # one rank's part -------------------------------------------------------------------------------------------------

    def receives(self, rank: int, phase: str) -> Iterator[Message]:
        """All that `rank` receives or keeps in a phase."""
        if phase == "combine":
            yield from self._combine(rank)
            return
        if not self.target.placement.contains(rank):
            return
        at = self.of_target.coords_of(rank)
        for cell, box in self.of_source.overlapping(self.of_target.box_at(at)):
            yield from self.received(phase, cell, box, rank, at)

    def sends(self, rank: int, phase: str) -> Iterator[Message]:
        """All that `rank` sends to others in a phase."""
        if phase == "combine":
            for merger in sorted({share.merger for shares in self.table.values() for share in shares} - {rank}):
                yield from (transfer for transfer in self._combine(merger) if transfer.sender == rank)
            return
        for cell, box, at, receiver in self._asking(rank, phase):
            if receiver == rank:
                continue
            for transfer in self.received(phase, cell, box, receiver, at, only=rank):
                if transfer.sender == rank:
                    yield transfer

    def _asking(self, rank: int, phase: str) -> Iterator[tuple[dict[int, int], Box, dict[int, int], int]]:
        """The atoms and receivers among which the partners of a sender are."""
        if phase == "gather":  # an owner sends ranges of its own target cell to the cell's other destinations
            if self.target.placement.contains(rank):
                at = self.of_target.coords_of(rank)
                wanting = self.destinations(at)
                for cell, box in self.of_source.overlapping(self.of_target.box_at(at)):
                    if self.merges(cell, at) or rank not in self.shares(cell, box, at).owned:
                        continue
                    for coords, receiver in wanting:
                        yield cell, box, coords, receiver
            return
        own = self.coords_in_source(rank)
        if own is None:
            return
        cell = {axis: own[axis] for axis in self.of_source.split_axes}
        if not self.same_placement and not self.table:
            yield from self._served(own, cell)
            return
        # mergers send to any owner; else, on one placement, a receiver asks the holder with its own coordinates on the
        # source's copy axes
        same = (*self.of_source.copy_axes, *self.apart) if not self.table else self.apart
        fixed = {axis: own[axis] for axis in same}
        cells = self.of_target
        for wanted, box in cells.overlapping(self.of_source.box_at(own), fixed):
            free = tuple(axis for axis in range(len(cells.sizes)) if axis not in wanted)
            for choice in cells.spread(free, fixed):
                at = dict(sorted({**wanted, **choice}.items()))
                yield cell, box, at, cells.rank_at(at)

    def _served(
        self, own: dict[int, int], cell: dict[int, int]
    ) -> Iterator[tuple[dict[int, int], Box, dict[int, int], int]]:
        """The same between placements: a receiver asks the copy that its number leads to."""
        source, target = self.of_source, self.of_target
        held, found = source.box_at(own), []
        if volume(held) == 0:
            return
        for at in target.congruent(target.ranges(held), source.number(source.copy_axes, own), source.copies):
            box = intersection(held, target.box_at(at))
            if volume(box):
                found.append((box, target.number(tuple(at), at), at))
        for box, _, at in sorted(found, key=lambda one: one[:2]):  # atom by atom
            yield cell, box, at, target.rank_at(at)

    def elements_received(self, rank: int, phase: str) -> int:
        """Elements that `rank` receives from others in a phase."""
        return sum(part.piece.size for part in self.receives(rank, phase) if part.sender != rank)

    @cached_property
    def summed(self) -> int:
        """Into how many summands an element is split, that are to be added."""
        return math.prod(self.of_source.sizes[axis] for axis in self.of_source.partial_axes if axis not in self.apart)

    @cached_property
    def families(self) -> int:
        """How many groups of ranks each want the value of an element."""
        return math.prod(self.of_target.sizes[axis] for axis in self.of_target.copy_axes if axis not in self.apart)

    @cached_property
    def has_families(self) -> bool:
        """Whether several ranks may share a value as summands."""
        return any(axis not in self.apart for axis in self.of_target.partial_axes)

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases that reach the fewest receipts."""
        if self.summed == 1:
            return ("move",)
        if self.has_families:
            return ("merge",) if self.families == 1 else ("merge", "reduce", "gather")
        combined = any(share.merger != share.owner for shares in self.table.values() for share in shares)
        return (("combine",) if combined else ()) + ("reduce",) + (("gather",) if self.families > 1 else ())

    def check(self, where: str) -> None:
        """Whether axes and shares fit the layouts.

        Raises:
            FlowError: an axis that does not exist, ranges that do not fill their atom, ranks that cannot do what
            they should.
        """
        source, target = self.source, self.target
        if source.shape != target.shape:
            raise FlowError(f"{where}: layouts of two shapes, {list(source.shape)} and {list(target.shape)}")
        axes = range(source.placement.ndim)
        if self.apart and not (
            self.same_placement
            and sorted(set(self.apart)) == list(self.apart)
            and all(axis in axes and source.nd_sbp[axis] == target.nd_sbp[axis] for axis in self.apart)
        ):
            raise FlowError(
                f"{where}: groups along axes need one placement that has the axes, in order, and leave what they hold; "
                f"apart is {list(self.apart)}"
            )
        if self.table and (self.apart or self.summed == 1 or self.has_families):
            raise FlowError(f"{where}: shares are for sums of all ranks together, into a target without P")
        for box, shares in self.table.items():
            self._check_shares(box, shares, where)

    def _check_shares(self, box: Box, shares: tuple[Share, ...], where: str) -> None:
        """Whether the box is an atom, its ranges fill it, and their ranks want or hold it."""
        at = f"{where}: the box {[list(bounds) for bounds in box]}"
        bounds = zip(box, self.source.shape, strict=True)
        first = tuple((start, start + 1) for start, _ in box)
        if not all(0 <= start < stop <= length for (start, stop), length in bounds):
            raise FlowError(f"{at} is no part of the shape {list(self.source.shape)}")
        (cell, _), (wanted, _) = (next(cells.overlapping(first)) for cells in (self.of_source, self.of_target))
        if box != intersection(self.of_source.box_at(cell), self.of_target.box_at(wanted)):
            raise FlowError(f"{at} of its shares is not the common box of two cells")
        ranges = sorted((share.piece.start, share.piece.stop) for share in shares)
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        if [0, *stops] != [*starts, volume(box)] or any(start >= stop for start, stop in ranges):
            raise FlowError(f"{at}: its ranges do not fill its {volume(box)} elements one after the other")
        for share in shares:
            if not self.target.placement.contains(share.owner) or not (
                share.merger == share.owner or self.source.placement.contains(share.merger)
            ):
                raise FlowError(f"{where}: rank {share.merger} or {share.owner} is not in the layouts of the step")
            own = self.of_target.coords_of(share.owner)
            if any(own[axis] != index for axis, index in wanted.items()):
                raise FlowError(f"{at}: rank {share.owner} should own a range, but its shard does not have the box")
            if share.merger != share.owner and not self.holds(share.merger, cell):
                raise FlowError(f"{at}: rank {share.merger} should merge a range, but holds nothing of the box")
