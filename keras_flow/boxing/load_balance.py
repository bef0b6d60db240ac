"""Shares: the table of an exchange with sums whose plain rule would load one rank more than needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from keras_flow.boxing.blocks import Box, volume
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Piece, Share

#: atoms times ranks up to which a table is searched for; above it the plain rule holds
SEARCHED = 1024


def balanced_exchange(exchange: Exchange) -> Exchange:
    """The same exchange, with a table of shares where that lowers the load of the most loaded rank.

    Of an atom with p summands and destinations D, every rank of D receives each element once; p - 2 further receipts
    (p - 1 where no destination holds a summand) may happen at any holder that can merge for an owner.
    """
    if exchange.summed == 1 or exchange.apart or exchange.of_target.partial_axes:
        return exchange
    ranks = exchange.source.placement.ranks
    targets = exchange.target.placement.ranks
    if len(ranks) > SEARCHED:
        return exchange
    places = sorted({*ranks, *targets})
    atoms = []
    for cell in exchange.of_source.spread(exchange.of_source.split_axes):
        for wanted, box in exchange.of_target.overlapping(exchange.of_source.box_at(cell)):
            atoms.append((cell, wanted, box))
            if len(atoms) * len(places) > SEARCHED:
                return exchange
    number = {rank: index for index, rank in enumerate(places)}
    base = [0] * len(places)
    supplies, choices = [], []
    for cell, wanted, box in atoms:
        owners = exchange.owners(cell, wanted)
        for _, rank in exchange.destinations(wanted):
            base[number[rank]] += volume(box)
        further = exchange.of_source.classes - (2 if exchange.holds(owners[0], cell) else 1)
        supplies.append(further * volume(box))
        choices.append([number[rank] for rank in _mergers(exchange, cell, owners)])
    plain = max(sum(exchange.elements_received(rank, phase) for phase in exchange.phases) for rank in places)
    limit, taken = least_limit(supplies, choices, base)
    if limit >= plain:
        return exchange
    table = {}
    for (cell, wanted, box), gave, supply in zip(atoms, taken, supplies, strict=True):
        table[box] = _cut(exchange, cell, wanted, box, {places[place]: load for place, load in gave.items()}, supply)
    return Exchange(exchange.source, exchange.target, table=table)


def _holders(exchange: Exchange, cell: dict[int, int]) -> list[int]:
    free = tuple(axis for axis in range(len(exchange.of_source.sizes)) if axis not in cell)
    return [exchange.of_source.rank_at({**cell, **choice}) for choice in exchange.of_source.spread(free)]


def _owner_for(exchange: Exchange, cell: dict[int, int], owners: list[int], merger: int, turn: int) -> int | None:
    """An owner that `merger` can merge for: itself, or one that holds another summand (or none)."""
    if merger in owners:
        return merger
    fitting = [
        owner
        for owner in owners
        if not exchange.holds(owner, cell) or exchange.summand_of(owner) != exchange.summand_of(merger)
    ]
    return fitting[turn % len(fitting)] if fitting else None


def _mergers(exchange: Exchange, cell: dict[int, int], owners: list[int]) -> list[int]:
    able = [rank for rank in _holders(exchange, cell) if _owner_for(exchange, cell, owners, rank, 0) is not None]
    return sorted({*owners, *able})


def _cut(
    exchange: Exchange, cell: dict[int, int], wanted: dict[int, int], box: Box, loads: dict[int, int], supply: int
) -> tuple[Share, ...]:
    """Ranges of the atom in proportion to the loads that the mergers take."""
    owners, size = exchange.owners(cell, wanted), volume(box)
    if supply == 0:
        return tuple(
            Share(owner, owner, Piece(box, size * k // len(owners), size * (k + 1) // len(owners)))
            for k, owner in enumerate(owners)
            if size * k // len(owners) < size * (k + 1) // len(owners)
        )
    shares, done = [], 0
    for turn, merger in enumerate(sorted(loads)):
        start = size * done // supply
        done += loads[merger]
        stop = size * done // supply
        owner = _owner_for(exchange, cell, owners, merger, turn)
        assert owner is not None
        if stop > start:
            shares.append(Share(merger, owner, Piece(box, start, stop)))
    return tuple(shares)


def least_limit(
    supplies: Sequence[int], choices: Sequence[Sequence[int]], base: Sequence[int]
) -> tuple[int, list[dict[int, int]]]:
    """Spread supplies over places so that the most loaded place has the least load.

    Args:
        supplies: what each source gives out.
        choices: for each source the places that may take from it.
        base: the load that each place has already.

    Returns:
        the load of the most loaded place, and for each source what each place takes of it.

    Example:
        >>> least_limit([6, 2], [[0, 1], [1]], [3, 0])
        (6, [{0: 3, 1: 3}, {1: 2}])
    """
    total = sum(supplies)
    low = max([*base, -(-(sum(base) + total) // max(len(base), 1)), 0])
    high = max(low, max(base, default=0) + total)
    while low < high:
        middle = (low + high) // 2
        if _spread(supplies, choices, [middle - load for load in base]) is None:
            low = middle + 1
        else:
            high = middle
    taken = _spread(supplies, choices, [low - load for load in base])
    assert taken is not None
    return low, taken


def _spread(
    supplies: Sequence[int], choices: Sequence[Sequence[int]], rooms: Sequence[int]
) -> list[dict[int, int]] | None:
    """A spreading that leaves every place its room, by shortest augmenting paths; None where there is none."""
    taken: list[dict[int, int]] = [{} for _ in supplies]
    rooms = list(rooms)
    for source, supply in enumerate(supplies):
        left = supply
        while left:
            # breadth first from the source over places and the sources that gave to them, to a place with room
            came: dict[int, tuple[int, int]] = {}  # place -> (source it is reached from, place before or -1)
            queue = deque([(source, -1)])
            goal = -1
            seen = {source}
            while queue and goal < 0:
                giving, before = queue.popleft()
                for place in choices[giving]:
                    if place in came:
                        continue
                    came[place] = (giving, before)
                    if rooms[place] > 0:
                        goal = place
                        break
                    for other, gave in enumerate(taken):
                        if gave.get(place, 0) > 0 and other not in seen:
                            seen.add(other)
                            queue.append((other, place))
            if goal < 0:
                return None
            path, amount, place = [], min(left, rooms[goal]), goal
            while place >= 0:
                giving, before = came[place]
                path.append((giving, place, before))
                if before >= 0:
                    amount = min(amount, taken[giving][before])
                place = before
            for giving, place, before in path:
                taken[giving][place] = taken[giving].get(place, 0) + amount
                if before >= 0:
                    taken[giving][before] -= amount
            rooms[goal] -= amount
            left -= amount
    return [{place: amount for place, amount in gave.items() if amount} for gave in taken]
