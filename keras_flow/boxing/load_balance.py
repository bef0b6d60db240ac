"""Load balance: a table of who adds what, for exchanges whose equal ranges load one rank more than needed.

Every destination of an element receives it once, whatever the plan. What can be placed freely is who adds the other
summands: the owner of a range or a *merger*, another holder that adds all summands but the owner's and sends it the
sum. Bytes in total are the same. That is a transport problem (atoms supply additions, ranks take them), solved by
maximum flow with shortest augmenting paths (Edmonds and Karp, J. ACM 19, 1972) under a limit for each rank, and a
binary search for the least limit.

Example: `S(0),P -> S(1),S(0)` on 2x2. Rank 0 wants the upper left atom and holds one of its two summands, rank 1 the
other. Rank 2 wants the upper right atom and holds no part of it. By equal ranges rank 2 receives both summands; with
the table ranks 0 and 1 add a part of it for rank 2.

    >>> from keras_flow.boxing.phases import elements_received
    >>> from keras_flow.layout import Layout
    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> plain = Exchange(Layout(mesh, "S(0),P", (64, 48)), Layout(mesh, "S(1),S(0)", (64, 48)))
    >>> balanced = balanced_exchange(plain)
    >>> for exchange in (plain, balanced):
    ...     [sum(elements_received(exchange, rank, phase) for phase in exchange.phases) for rank in range(4)]
    [768, 1536, 1536, 768]
    [1152, 1152, 1152, 1152]

What it buys: on 2x2 6 of the 256 pairs of layouts of a (8, 12) tensor get a table, of a (5, 7) tensor 13, on 2x4 8 of
those of a (16, 24) tensor, with one axis none; their most loaded rank receives 1.14 to 1.5 times less. JAX runs the
equal ranges instead, which have fewer messages.

Limits: up to 1024 atoms times ranks; not with a P in the target or in groups. A table gives an element's additions to
one rank, so loads of uneven shapes may be off by a few elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from keras_flow.boxing.blocks import Box, volume
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Piece, Share
from keras_flow.boxing.phases import elements_received

#: atoms times ranks up to which a table is made; above it ranges are equal
SEARCHED = 1024


def balanced_exchange(exchange: Exchange) -> Exchange:
    """The same exchange, with a table where that lowers the load of the most loaded rank.

    Of an atom with p summands and destinations D every rank of D receives each element once, which is its `base` load;
    p - 2 further receipts (p - 1 where no destination holds a summand) may happen at any rank that can merge.
    """
    if exchange.summand_count == 1 or exchange.apart or exchange.target_blocks.partial_axes:
        return exchange
    source, target = exchange.source_blocks, exchange.target_blocks
    if exchange.source.placement.size > SEARCHED:
        return exchange
    ranks = sorted({*exchange.source.placement.ranks, *exchange.target.placement.ranks})
    atoms: list[tuple[dict[int, int], dict[int, int], Box]] = []
    for block in source.all_coords(source.split_axes):
        for wanted, box in target.overlapping(source.box_at(block)):
            atoms.append((block, wanted, box))
            if len(atoms) * len(ranks) > SEARCHED:
                return exchange
    number = {rank: index for index, rank in enumerate(ranks)}
    base = [0] * len(ranks)
    supplies: list[int] = []
    choices: list[list[int]] = []
    for block, wanted, box in atoms:
        owners = exchange.owners(block, wanted)
        for _, rank in exchange.destinations(wanted):
            base[number[rank]] += volume(box)
        # an owner that holds a summand saves one receipt; all owners of an atom hold one, or none does
        further = source.summands - (2 if exchange.holds(owners[0], block) else 1)
        supplies.append(further * volume(box))
        choices.append([number[rank] for rank in _possible_mergers(exchange, block, owners)])
    # the largest load with equal ranges: a table must lower it to be worth its messages
    plain = max(sum(elements_received(exchange, rank, phase) for phase in exchange.phases) for rank in ranks)
    limit, flows = least_limit(supplies, choices, base)
    if limit >= plain:
        return exchange
    table: dict[Box, tuple[Share, ...]] = {}
    for (block, wanted, box), flow, supply in zip(atoms, flows, supplies, strict=True):
        pieces = [(ranks[place], amount) for place, amount in sorted(flow.items())]
        owners = exchange.owners(block, wanted)
        if supply:
            table[box] = _shares_in_proportion(exchange, block, Piece.whole(box), owners, pieces, supply)
        else:  # nothing can be placed: ranges as equal as whole elements allow
            size = volume(box)
            # each owner receives the one summand that it lacks: nothing is left to place
            cuts = [size * k // len(owners) for k in range(len(owners) + 1)]
            table[box] = tuple(
                Share(owner, owner, Piece(box, start, stop))
                for owner, start, stop in zip(owners, cuts, cuts[1:], strict=False)
                if start < stop
            )
    return Exchange(exchange.source, exchange.target, table=table)


def _shares_in_proportion(
    exchange: Exchange,
    block: dict[int, int],
    atom: Piece,
    owners: list[int],
    loads: Sequence[tuple[int, int]],
    supply: int,
) -> tuple[Share, ...]:
    """Ranges of an atom in proportion to the receipts that each merger takes of the atom's `supply`."""
    shares: list[Share] = []
    done = 0
    for turn, (merger, load) in enumerate(loads):
        start = atom.size * done // supply
        done += load
        stop = atom.size * done // supply
        # `turn` spreads the ranges of mergers over the owners
        owner = _owner_for(exchange, block, owners, merger, turn)
        assert owner is not None
        if stop > start:
            shares.append(Share(merger, owner, Piece(atom.box, start, stop)))
    return tuple(shares)


def _possible_mergers(exchange: Exchange, block: dict[int, int], owners: list[int]) -> list[int]:
    """The owners, and the holders of a source block that can merge for one of them."""
    source = exchange.source_blocks
    free = tuple(axis for axis in range(len(source.sizes)) if axis not in block)
    holders = [source.rank_at({**block, **choice}) for choice in source.all_coords(free)]
    able = [rank for rank in holders if _owner_for(exchange, block, owners, rank, 0) is not None]
    return sorted({*owners, *able})


def _owner_for(exchange: Exchange, block: dict[int, int], owners: list[int], merger: int, turn: int) -> int | None:
    """An owner that `merger` can merge for: itself, or one that holds another summand or none.

    A merger that held the owner's own summand would have nothing of its own to add, and receive one summand more.
    """
    if merger in owners:
        return merger
    fitting = [
        owner
        for owner in owners
        if not exchange.holds(owner, block) or exchange.summand_of(owner) != exchange.summand_of(merger)
    ]
    return fitting[turn % len(fitting)] if fitting else None


def least_limit(
    supplies: Sequence[int], choices: Sequence[Sequence[int]], base: Sequence[int]
) -> tuple[int, list[dict[int, int]]]:
    """Distribute supplies over places so that the most loaded place has the least load.

    Args:
        supplies: what each source gives out.
        choices: for each source the places that may take from it.
        base: the load that each place has already.

    Returns:
        The load of the most loaded place, and for each source what each place takes of it.

    Example:
        >>> least_limit([6, 2], [[0, 1], [1]], [3, 0])
        (6, [{0: 3, 1: 3}, {1: 2}])
    """
    total = sum(supplies)
    low = max([*base, -(-(sum(base) + total) // max(len(base), 1)), 0])  # no limit is below the mean, rounded up
    # under this limit any distribution fits
    high = max(low, max(base, default=0) + total)
    while low < high:
        middle = (low + high) // 2
        if _flows(supplies, choices, [middle - load for load in base]) is None:
            low = middle + 1
        else:
            high = middle
    flows = _flows(supplies, choices, [low - load for load in base])
    assert flows is not None
    return low, flows


def _flows(
    supplies: Sequence[int], choices: Sequence[Sequence[int]], rooms: Sequence[int]
) -> list[dict[int, int]] | None:
    """What each place takes of each source if no place takes more than its room; None where that is impossible.

    Maximum flow in the bipartite graph of sources and places by shortest augmenting paths.
    """
    flows: list[dict[int, int]] = [{} for _ in supplies]
    rooms = list(rooms)
    for source, supply in enumerate(supplies):
        left = supply
        while left:
            # breadth first, from the source over places and the sources that already give to them, to a place with room
            reached: dict[int, tuple[int, int]] = {}  # place -> (source it is reached from, place before or -1)
            queue = deque([(source, -1)])
            goal = -1
            seen = {source}
            while queue and goal < 0:
                giving, before = queue.popleft()
                for place in choices[giving]:
                    if place in reached:
                        continue
                    reached[place] = (giving, before)
                    if rooms[place] > 0:
                        goal = place
                        break
                    for other, flow in enumerate(flows):
                        if flow.get(place, 0) > 0 and other not in seen:
                            seen.add(other)
                            queue.append((other, place))
            if goal < 0:
                return None
            # backwards from the goal: a source on the path gives to the next place what it gave to the one before
            path: list[tuple[int, int, int]] = []
            amount, place = min(left, rooms[goal]), goal
            while place >= 0:
                giving, before = reached[place]
                path.append((giving, place, before))
                if before >= 0:
                    amount = min(amount, flows[giving][before])
                place = before
            for giving, place, before in path:
                flows[giving][place] = flows[giving].get(place, 0) + amount
                if before >= 0:
                    flows[giving][before] -= amount
            rooms[goal] -= amount
            left -= amount
    return [{place: amount for place, amount in flow.items() if amount} for flow in flows]
