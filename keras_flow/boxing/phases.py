"""Phases: the messages of an exchange, for one rank at a time.

An exchange is one of three algorithms, each reaching the lower bound of `lower_bound.py` (docs/boxing-spec.md has the
table):

- No P in the source: `move`. A rank that holds an element keeps it, any other receives it once.
- P in the source, none in the target: `reduce`, then `gather`. As in a reduce-scatter and an all-gather (Rabenseifner's
  all-reduce; Patarasuk and Yuan, 2009), but for any two layouts: an atom is cut into equal ranges, one for each owner,
  who adds its range and then sends it to the other destinations.
- P on both sides: `merge` for atoms where it takes fewer receipts than the two above. Every summand moves to the member
  that keeps it, and nothing is added up.

Example: `P -> S(0)` on two ranks that hold summands of 2x2 elements is a reduce-scatter: each rank receives the other's
summand of its own row.

    >>> from keras_flow.boxing.exchange import Exchange
    >>> from keras_flow.layout import Layout
    >>> from keras_flow.placements import Placement
    >>> pair = Placement([0, 1])
    >>> exchange = Exchange(Layout(pair, "P", (2, 2)), Layout(pair, "S(0)", (2, 2)))
    >>> [(m.sender, m.piece.box) for m in receives(exchange, 0, "reduce")]
    [(0, ((0, 1), (0, 2))), (1, ((0, 1), (0, 2)))]
    >>> [(m.receiver, m.piece.box) for m in sends(exchange, 0, "reduce")]
    [(1, ((1, 2), (0, 2)))]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from keras_flow.boxing.blocks import Box, Coords, intersection
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Message, Piece

#: Coordinates of a source block, the atom's box, a receiver, its coordinates in the target. With a last argument, a
#: rank, messages that cannot come from it may be left out.
_Rule = Callable[[Exchange, Coords, Box, int, Coords, "int | None"], Iterator[Message]]


def receives(exchange: Exchange, rank: int, phase: str) -> Iterator[Message]:
    """All messages that `rank` receives in a phase, and those that it takes from itself."""
    if not exchange.target.placement.contains(rank):
        return
    at = exchange.target_blocks.coords_of(rank)
    # each source block that meets the target's block is one atom
    for block, box in exchange.source_blocks.overlapping(exchange.target_blocks.box_at(at)):
        yield from RULES[phase](exchange, block, box, rank, at, None)


def sends(exchange: Exchange, rank: int, phase: str) -> Iterator[Message]:
    """All messages that `rank` sends to others in a phase."""
    # the rules say what a receiver takes: evaluate them for all receivers that may ask this rank
    for block, box, at, receiver in _possible_receivers(exchange, rank, phase):
        if receiver != rank:
            for message in RULES[phase](exchange, block, box, receiver, at, rank):
                if message.sender == rank:
                    yield message


def elements_received(exchange: Exchange, rank: int, phase: str) -> int:
    """Elements that `rank` receives from others in a phase."""
    return sum(message.piece.size for message in receives(exchange, rank, phase) if message.sender != rank)


# ---- the rules: what a receiver takes of one atom


def _move(exchange: Exchange, block: Coords, box: Box, rank: int, at: Coords, only_from: int | None):
    blocks = exchange.source_blocks
    number = blocks.number(blocks.split_axes, block)
    # one summand: where a P axis is left as it is, that of the rank's group
    for summand in exchange.summands(at, only_from):
        if exchange.keeps(block, summand, at, number):
            yield Message(exchange.sender(block, summand, rank, at), rank, Piece.whole(box))


def _merge(exchange: Exchange, block: Coords, box: Box, rank: int, at: Coords, only_from: int | None):
    if not exchange.merges(block, at):
        return
    blocks = exchange.source_blocks
    for summand in exchange.summands(at, only_from):
        number = blocks.number(blocks.split_axes, block) + blocks.number(blocks.partial_axes, summand)
        if exchange.keeps(block, summand, at, number):
            yield Message(exchange.sender(block, summand, rank, at), rank, Piece.whole(box))


def _reduce(exchange: Exchange, block: Coords, box: Box, rank: int, at: Coords, only_from: int | None):
    if exchange.merges(block, at):
        return
    own = exchange.ranges(block, box, at).get(rank)
    if own is not None:
        for summand in exchange.summands(at, only_from):
            yield Message(exchange.sender(block, summand, rank, at), rank, own)


def _gather(exchange: Exchange, block: Coords, box: Box, rank: int, at: Coords, only_from: int | None):
    if exchange.merges(block, at):
        return
    blocks = exchange.target_blocks
    ranges = exchange.ranges(block, box, at)
    for owner in ranges if only_from is None else [only_from]:
        if owner in ranges and owner != rank:  # the owner itself has it already
            # of each family the copy of the owner's member keeps the range
            member = blocks.coords_of(owner)
            if rank == blocks.rank_at({**at, **{axis: member[axis] for axis in exchange.member_axes}}):
                yield Message(owner, rank, ranges[owner], "result")


RULES: dict[str, _Rule] = {"move": _move, "merge": _merge, "reduce": _reduce, "gather": _gather}


# ---- the other way round: who may ask a rank


def _possible_receivers(
    exchange: Exchange, rank: int, phase: str
) -> Iterator[tuple[dict[int, int], Box, dict[int, int], int]]:
    """Atoms (source block, box) with target coordinates and receivers, among which all receivers of a sender are."""
    target = exchange.target_blocks
    if phase == "gather":  # an owner sends ranges of its own target block to the block's other destinations
        if exchange.target.placement.contains(rank):
            at = target.coords_of(rank)
            destinations = exchange.destinations(at)
            # only atoms of which this rank owns a range
            for block, box in exchange.source_blocks.overlapping(target.box_at(at)):
                if exchange.merges(block, at) or rank not in exchange.ranges(block, box, at):
                    continue
                for coords, receiver in destinations:
                    yield block, box, coords, receiver
        return
    own = exchange.source_coords(rank)
    if own is None:
        return
    block = {axis: own[axis] for axis in exchange.source_blocks.split_axes}
    if not exchange.same_placement:
        yield from _receivers_elsewhere(exchange, own, block)
        return
    # A receiver asks the holder that has its own coordinates on the source's copy axes, so only receivers with this
    # rank's coordinates there are looked at.
    fixed = {axis: own[axis] for axis in (*exchange.source_blocks.copy_axes, *exchange.apart)}
    for target_block, box in target.overlapping(exchange.source_blocks.box_at(own), fixed):
        free = tuple(axis for axis in range(len(target.sizes)) if axis not in target_block)
        for choice in target.all_coords(free, fixed):
            # in the order of the axes: numbers are taken of coordinates in this order
            at = dict(sorted({**target_block, **choice}.items()))
            yield block, box, at, target.rank_at(at)


def _receivers_elsewhere(
    exchange: Exchange, own: dict[int, int], block: dict[int, int]
) -> Iterator[tuple[dict[int, int], Box, dict[int, int], int]]:
    """Return the possible receivers of a rank between two placements.

    There a receiver asks the copy whose number is its own position modulo the number of copies (`Exchange.sender`). All
    positions are tested at a time, as arrays; on 65,536 ranks that takes milliseconds.
    """
    source, target = exchange.source_blocks, exchange.target_blocks
    held = source.box_at(own)
    axes = tuple(range(len(target.sizes)))
    positions = np.arange(exchange.target.placement.size)
    coords = np.unravel_index(positions, target.sizes)
    asks = positions % source.copies == source.number(source.copy_axes, own)
    for dim, (first, last) in enumerate(held):
        start, stop = target.bounds_at(dim, coords)
        asks &= np.minimum(stop, last) > np.maximum(start, first)
    asking: list[tuple[Box, int, dict[int, int]]] = []
    for position in np.flatnonzero(asks).tolist():
        at = target.coords_of_number(axes, position)
        asking.append((intersection(held, target.box_at(at)), position, dict(sorted(at.items()))))
    for box, _, at in sorted(asking, key=lambda entry: entry[:2]):  # atom by atom: ranges are worked out once for each
        yield block, box, at, target.rank_at(at)
