"""How the messages of an exchange go on JAX: in which rounds, and where collectives carry them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from keras_flow.boxing.blocks import Blocks
from keras_flow.boxing.messages import Message, Piece
from keras_flow.boxing.phases import receives
from keras_flow.boxing.step import Step

#: the messages of a round: (sender, receiver) -> what is in its message
Pairs = dict[tuple[int, int], list[Message]]


def _messages(step: Step, phase: str, ranks: tuple[int, ...]) -> Pairs:
    """The messages of a phase. Of ranks that hold copies the one sends that has least to send: fewer rounds."""
    copies = step.exchange.source_blocks.copy_axes if step.exchange.same_placement else ()
    messages: Pairs = {}
    load: Counter[int] = Counter()
    come = [part for rank in ranks for part in receives(step.exchange, rank, phase)]
    for part in sorted(come, key=lambda part: part.sender != part.receiver):
        sender = part.sender
        if copies and part.origin == "source" and sender != part.receiver:
            cells = step.exchange.source_blocks
            at = {axis: index for axis, index in cells.coords_of(sender).items() if axis not in copies}
            holders = [cells.rank_at(coords) for coords in cells.all_coords(tuple(range(len(cells.sizes))), at)]
            sender = min(holders, key=lambda rank: (load[rank], rank != part.sender))
        load[sender] += 1
        messages.setdefault((sender, part.receiver), []).append(part)
    return messages


def rounds(step: Step, phase: str, ranks: tuple[int, ...], key: Callable[[list[Message]], object]) -> list[Pairs]:
    """The messages of a phase in rounds; those of a round have one key."""
    ordered = []
    for messages in by_key(step, phase, ranks, key):
        pairs = list(messages)
        ordered += [{pairs[one]: messages[pairs[one]] for one in found} for found in in_rounds(pairs, ranks)]
    return ordered


def by_key(step: Step, phase: str, ranks: tuple[int, ...], key: Callable[[list[Message]], object]) -> list[Pairs]:
    """The messages of a phase, those of one key together."""
    of_key: dict[object, Pairs] = {}
    for pair, message in _messages(step, phase, ranks).items():
        of_key.setdefault(key(message), {})[pair] = message
    return list(of_key.values())


def in_rounds(pairs: Sequence[tuple[int, int]], ranks: tuple[int, ...]) -> list[list[int]]:
    """Numbers of messages (sender, receiver) in rounds: in one each rank sends and receives one at most.

    A pair may have several messages. What ranks have themselves is a round, without sending, unless it fits into the
    rounds of the others.
    """
    numbers = list(range(len(pairs)))
    own = [one for one in numbers if pairs[one][0] == pairs[one][1]]
    others = [one for one in numbers if pairs[one][0] != pairs[one][1]]
    if own and (len(own) == len(ranks) or _most(pairs, numbers) > _most(pairs, others)):
        return [*_matchings(pairs, own, ranks), *_matchings(pairs, others, ranks)]
    return _matchings(pairs, numbers, ranks)


def _most(pairs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> int:
    """Most messages that a rank sends or receives."""
    ends = Counter((end, pairs[one][end]) for one in numbers for end in (0, 1))
    return max(ends.values(), default=0)


def _matchings(pairs: Sequence[tuple[int, int]], numbers: Sequence[int], ranks: tuple[int, ...]) -> list[list[int]]:
    """As many rounds as the busiest rank has messages (Koenig 1916): each has a message of every rank that is busiest
    then."""
    from scipy.optimize import linear_sum_assignment  # JAX requires scipy

    place = {rank: number for number, rank in enumerate(ranks)}
    left = list(numbers)
    found = []
    while left:
        ends = Counter((end, pairs[one][end]) for one in left for end in (0, 1))
        most = max(ends.values())
        weights = np.zeros((len(ranks), len(ranks)))
        at = {(place[pairs[one][0]], place[pairs[one][1]]): one for one in reversed(left)}
        for (row, column), one in at.items():
            busiest = sum(ends[end, pairs[one][end]] == most for end in (0, 1))
            weights[row, column] = busiest + 1 / (2 * len(ranks))
        chosen = [at[pair] for pair in zip(*linear_sum_assignment(weights, maximize=True), strict=True) if pair in at]
        found.append(chosen)
        left = [one for one in left if one not in chosen]
    return found


#: maker -> (receiver, piece): a sum that each rank makes, and the rank that is to have it
Sums = dict[int, tuple[int, Piece]]


@functools.lru_cache(maxsize=256)
def sums(step: Step) -> list[Sums] | None:
    """The sums of the phase `reduce` as reduce-scatters can make them: in each, every rank makes one of one size.

    The ranks that hold the summands of one source cell make a group. What a rank of the group wants it makes itself;
    what others want is made by any, and sent on. That receives what the phase does.

    Returns:
        None where sums do not lie so.
    """
    exchange = step.exchange
    if not (exchange.same_placement and is_alike(step)) or exchange.summand_count == 1:
        return None
    axes = tuple(axis for axis in exchange.source_blocks.partial_axes if axis not in exchange.apart)
    groups = _wanted(step, axes)
    counts = {len(wanted) for wanted in groups.values()}
    likes = {(piece.box_shape, piece.size) for wanted in groups.values() for _, piece in wanted}
    if len(counts) != 1 or len(likes) != 1:
        return None
    each, rest = divmod(counts.pop(), exchange.summand_count)
    made: list[Sums] = [{} for _ in range(each)]
    for members, wanted in groups.items():
        of = {member: [one for one in wanted if one[0] == member] for member in sorted(members)}
        if rest or any(len(own) > each for own in of.values()):
            return None
        for number, one in enumerate(one for one in wanted if one[0] not in members):
            free = [member for member in of if len(of[member]) < each]
            # one with the receiver's coordinates: so all makers send at one time
            near = [member for member in free if _alike_on(exchange.source_blocks, member, one[0], axes)]
            of[(near or free)[number % len(near or free)]].append(one)
        for member, own in of.items():
            for slot, one in enumerate(sorted(own, key=lambda one: (one[1].box, one[1].start))):
                made[slot][member] = one
    return made


def _wanted(step: Step, axes: tuple[int, ...]) -> dict[frozenset[int], list[tuple[int, Piece]]]:
    """Groups of ranks along the axes, and what ranks want summed of each; empty where summands do not lie so."""
    exchange, ranks = step.exchange, step.exchange.source.placement.ranks
    members = along(ranks, exchange.source_blocks.sizes, axes)
    groups: dict[frozenset[int], list[tuple[int, Piece]]] = {frozenset(group): [] for group in members.values()}
    for rank in ranks:
        senders: dict[Piece, set[int]] = {}
        for part in receives(exchange, rank, "reduce"):
            if part.origin != "source":
                return {}
            senders.setdefault(part.piece, set()).add(part.sender)
        for piece, group in senders.items():
            if frozenset(group) not in groups:
                return {}
            groups[frozenset(group)].append((rank, piece))
    return groups


def along(ranks: Sequence[int], sizes: Sequence[int], axes: Sequence[int]) -> dict[int, list[int]]:
    """For each rank of a grid those that differ from it on some axes only, the first of these slowest."""
    grid = np.asarray(ranks).reshape(sizes)
    rest = [axis for axis in range(grid.ndim) if axis not in axes]
    groups = grid.transpose(*rest, *axes).reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()
    return {one: group for group in groups for one in group}


def _alike_on(cells: Blocks, rank: int, other: int, axes: tuple[int, ...]) -> bool:
    """Whether two ranks have the same coordinates on some axes."""
    here, there = cells.coords_of(rank), cells.coords_of(other)
    return all(here[axis] == there[axis] for axis in axes)


@functools.lru_cache(maxsize=256)
def gathers(step: Step) -> dict[int, frozenset[Piece]] | None:
    """What each rank gives all others that want its target cell, in the phase `gather`, as an all-gather can do it.

    Returns:
        None where they do not all give as much.
    """
    exchange, ranks = step.exchange, step.exchange.source.placement.ranks
    axes = exchange.target_blocks.copy_axes
    if not (exchange.same_placement and is_alike(step)) or not axes:
        return None
    given: dict[tuple[int, int], set[Piece]] = {}
    for rank in ranks:
        for part in receives(exchange, rank, "gather"):
            if part.origin != "result":
                return None
            given.setdefault((part.sender, rank), set()).add(part.piece)
    gives = {sender: frozenset(pieces) for (sender, _), pieces in given.items()}
    likes = {(len(pieces), piece.box_shape, piece.size) for pieces in gives.values() for piece in pieces}
    if len(gives) != len(ranks) or len(likes) != 1:
        return None
    members = along(ranks, exchange.target_blocks.sizes, axes)
    pairs = [(other, rank) for rank in ranks for other in members[rank] if other != rank]
    return gives if all(given.get((other, rank)) == gives[other] for other, rank in pairs) else None


def is_alike(step: Step) -> bool:
    """Whether all shards on each side are of one shape, and the same ranks hold them."""
    source, target = step.exchange.source, step.exchange.target
    one_group = set(source.placement.ranks) == set(target.placement.ranks)
    return one_group and source.divides and target.divides and 0 not in source.shape


def likeness(message: list[Message]) -> tuple:
    """What messages have in common that are cut and put by one program."""
    return tuple((part.origin, part.piece.box_shape, part.piece.size) for part in message)


def elements(message: list[Message]) -> int:
    return sum(part.piece.size for part in message)
