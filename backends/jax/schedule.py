"""Schedule: in which rounds the messages of an exchange go on JAX, and which of them a collective carries.

In one round (`lax.ppermute`) each rank sends and receives at most one message, and all messages have one size, so that
nothing is padded on its way. A round costs the same whether all ranks send in it or one does, so the fewest rounds win:
as many as the busiest rank has messages. That many suffice, because senders and receivers are the two sides of a
bipartite graph with messages as edges, whose edges can be coloured with as many colours as the largest degree (Koenig,
Mathematische Annalen 77, 1916).

Sums and copies need no rounds where `scattered_sums` and `gathered_pieces` find that they are a reduce-scatter or an
all-gather. Both executors of exchanges, `uniform_exchange.py` and that of `boxing.py` for uneven shards, take their
rounds from here.

Limits: a round waits for all its messages; how long links are is not looked at.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from keras_flow.backends.jax.rank_grid import groups_along
from keras_flow.boxing.blocks import Blocks
from keras_flow.boxing.messages import Message, Piece
from keras_flow.boxing.phases import receives
from keras_flow.boxing.step import Step

#: (sender, receiver) -> the messages that go between the two, as one
Parcels = dict[tuple[int, int], list[Message]]
#: what parcels must have in common to go in one round
Form = Callable[[list[Message]], object]


def is_uniform(step: Step) -> bool:
    """Whether all shards on each side have one shape, and the same ranks hold them."""
    source, target = step.exchange.source, step.exchange.target
    same_ranks = set(source.placement.ranks) == set(target.placement.ranks)
    return same_ranks and source.divides and target.divides and 0 not in source.shape


def element_count(parcel: list[Message]) -> int:
    """Form of parcels that are packed flat: their elements."""
    return sum(message.piece.size for message in parcel)


def shapes(parcel: list[Message]) -> tuple:
    """Form of parcels whose pieces keep their shape: buffers, boxes and sizes, so that one program reads them all."""
    return tuple((message.origin, message.piece.box_shape, message.piece.size) for message in parcel)


def rounds(step: Step, phase: str, ranks: tuple[int, ...], form: Form) -> list[Parcels]:
    """The parcels of a phase in rounds; those of one round have one form."""
    ordered = []
    for parcels in by_form(step, phase, ranks, form):
        pairs = list(parcels)
        for numbers in in_rounds(pairs, ranks):
            ordered.append({pairs[number]: parcels[pairs[number]] for number in numbers})
    return ordered


def by_form(step: Step, phase: str, ranks: tuple[int, ...], form: Form) -> list[Parcels]:
    """The parcels of a phase, those of one form together."""
    # messages of different sizes never share a round: the smaller would have to be padded
    grouped: dict[object, Parcels] = {}
    for pair, parcel in _parcels(step, phase, ranks).items():
        grouped.setdefault(form(parcel), {})[pair] = parcel
    return list(grouped.values())


def _parcels(step: Step, phase: str, ranks: tuple[int, ...]) -> Parcels:
    """The messages of a phase, those between two ranks together.

    A plan names one holder of copies as sender. Any holder has the same values, so here the one sends that has least to
    send so far: the busiest rank decides how many rounds there are.
    """
    copies = step.exchange.source_blocks.copy_axes if step.exchange.same_placement else ()
    parcels: Parcels = {}
    load: Counter[int] = Counter()
    messages = [message for rank in ranks for message in receives(step.exchange, rank, phase)]
    # first what ranks take from themselves: it cannot be moved to another sender, and counts as load
    for message in sorted(messages, key=lambda message: message.sender != message.receiver):
        sender = message.sender
        if copies and message.origin == "source" and sender != message.receiver:
            blocks = step.exchange.source_blocks
            at = {axis: index for axis, index in blocks.coords_of(sender).items() if axis not in copies}
            holders = [blocks.rank_at(coords) for coords in blocks.all_coords(tuple(range(len(blocks.sizes))), at)]
            sender = min(holders, key=lambda rank: (load[rank], rank != message.sender))
        load[sender] += 1
        parcels.setdefault((sender, message.receiver), []).append(message)
    return parcels


def in_rounds(pairs: Sequence[tuple[int, int]], ranks: tuple[int, ...]) -> list[list[int]]:
    """Numbers of messages (sender, receiver) in rounds. Two ranks may have several messages.

    What ranks take from themselves is a round of its own, which sends nothing, unless it fits into the rounds of the
    others.

    Example: rank 0 has two messages to send, so there are two rounds; rank 2's goes with the first.
        >>> in_rounds([(0, 1), (0, 2), (2, 0)], (0, 1, 2))
        [[0, 2], [1]]
    """
    numbers = list(range(len(pairs)))
    own = [number for number in numbers if pairs[number][0] == pairs[number][1]]
    others = [number for number in numbers if pairs[number][0] != pairs[number][1]]
    # as a round of their own they cost no communication; in a round with others they cost no extra one
    if own and (len(own) == len(ranks) or _busiest(pairs, numbers) > _busiest(pairs, others)):
        return [*_matchings(pairs, own, ranks), *_matchings(pairs, others, ranks)]
    return _matchings(pairs, numbers, ranks)


def _busiest(pairs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> int:
    """Most messages that a rank sends, or receives."""
    return max(_degrees(pairs, numbers).values(), default=0)


def _degrees(pairs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> Counter[tuple[int, int]]:
    """(0, sender) and (1, receiver) -> how many of these messages they have."""
    return Counter((end, pairs[number][end]) for number in numbers for end in (0, 1))


def _matchings(pairs: Sequence[tuple[int, int]], numbers: Sequence[int], ranks: tuple[int, ...]) -> list[list[int]]:
    """Return as many rounds as the busiest rank has messages, by maximum-weight matchings.

    Koenig's theorem holds because a bipartite graph has a matching that covers all nodes of the largest degree. A round
    that is such a matching lowers the largest degree by one.
    """
    from scipy.optimize import linear_sum_assignment  # JAX requires scipy

    position = {rank: number for number, rank in enumerate(ranks)}
    left = list(numbers)
    rounds = []
    while left:
        degrees = _degrees(pairs, left)
        most = max(degrees.values())
        # An edge weighs as many as its ends have the largest degree, so the heaviest matching covers all of these. The
        # small weight beside it prefers more messages; of all edges of a matching together it is below one such end.
        weights = np.zeros((len(ranks), len(ranks)))
        at = {(position[pairs[number][0]], position[pairs[number][1]]): number for number in reversed(left)}
        for (row, column), number in at.items():
            busiest_ends = sum(degrees[end, pairs[number][end]] == most for end in (0, 1))
            weights[row, column] = busiest_ends + 1 / (2 * len(ranks))
        matched = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
        chosen = [at[edge] for edge in matched if edge in at]
        rounds.append(chosen)
        done = set(chosen)
        left = [number for number in left if number not in done]
    return rounds


# ---- collectives inside an exchange

#: the rank that adds -> (the rank that wants the sum, its piece): sums that one reduce-scatter makes at a time
Sums = dict[int, tuple[int, Piece]]


@functools.lru_cache(maxsize=256)
def scattered_sums(step: Step) -> list[Sums] | None:
    """The sums of the phase `reduce` as one reduce-scatter can make them: every rank adds the same number of pieces.

    The ranks that hold the summands of one source block are a group. A rank of the group adds what it wants itself;
    what ranks outside want is added by any rank of the group and sent on. That receives what the phase does.

    Returns:
        For each piece of a rank, in order, who adds it for whom; None where sums are not divided so.
    """
    exchange = step.exchange
    if not (exchange.same_placement and is_uniform(step)) or exchange.summand_count == 1:
        return None
    axes = tuple(axis for axis in exchange.source_blocks.partial_axes if axis not in exchange.apart)
    # a reduce-scatter gives each rank of a group as much, so all groups must want as many sums of one form
    groups = _wanted_sums(step, axes)
    counts = {len(wanted) for wanted in groups.values()}
    forms = {(piece.box_shape, piece.size) for wanted in groups.values() for _, piece in wanted}
    if len(counts) != 1 or len(forms) != 1:
        return None
    each, rest = divmod(counts.pop(), exchange.summand_count)
    sums: list[Sums] = [{} for _ in range(each)]
    for group, wanted in groups.items():
        added_by = {member: [request for request in wanted if request[0] == member] for member in sorted(group)}
        if rest or any(len(own) > each for own in added_by.values()):
            return None
        for number, request in enumerate(request for request in wanted if request[0] not in group):
            free = [member for member in added_by if len(added_by[member]) < each]
            # one with the receiver's coordinates on the group's axes: then all who send on do so in one round
            near = [member for member in free if _same_coords(exchange.source_blocks, member, request[0], axes)]
            added_by[(near or free)[number % len(near or free)]].append(request)
        for member, own in added_by.items():
            # in the order of the boxes, so that slots of different ranks are like parts of their shards
            for slot, request in enumerate(sorted(own, key=lambda request: (request[1].box, request[1].start))):
                sums[slot][member] = request
    return sums


def _wanted_sums(step: Step, axes: tuple[int, ...]) -> dict[frozenset[int], list[tuple[int, Piece]]]:
    """Groups of ranks along `axes`, and (rank, piece) of the sums that are wanted of each.

    Empty where the summands of a piece are not those of one group.
    """
    exchange, ranks = step.exchange, step.exchange.source.placement.ranks
    members = groups_along(ranks, exchange.source_blocks.sizes, axes)
    groups: dict[frozenset[int], list[tuple[int, Piece]]] = {frozenset(group): [] for group in members.values()}
    for rank in ranks:
        senders: dict[Piece, set[int]] = {}
        for message in receives(exchange, rank, "reduce"):
            # what was summed before is no summand of a group
            if message.origin != "source":
                return {}
            senders.setdefault(message.piece, set()).add(message.sender)
        for piece, group in senders.items():
            if frozenset(group) not in groups:
                return {}
            groups[frozenset(group)].append((rank, piece))
    return groups


def _same_coords(blocks: Blocks, rank: int, other: int, axes: tuple[int, ...]) -> bool:
    """Whether two ranks have the same coordinates on some axes."""
    here, there = blocks.coords_of(rank), blocks.coords_of(other)
    return all(here[axis] == there[axis] for axis in axes)


@functools.lru_cache(maxsize=256)
def gathered_pieces(step: Step) -> dict[int, frozenset[Piece]] | None:
    """Return the pieces that each rank sends in the phase `gather`, where one all-gather can do that phase.

    Returns:
        None where ranks do not all give as much, or not to all the others.
    """
    exchange, ranks = step.exchange, step.exchange.source.placement.ranks
    axes = exchange.target_blocks.copy_axes
    if not (exchange.same_placement and is_uniform(step)) or not axes:
        return None
    given: dict[tuple[int, int], set[Piece]] = {}
    for rank in ranks:
        for message in receives(exchange, rank, "gather"):
            if message.origin != "result":
                return None
            given.setdefault((message.sender, rank), set()).add(message.piece)
    gives = {sender: frozenset(pieces) for (sender, _), pieces in given.items()}
    forms = {(len(pieces), piece.box_shape, piece.size) for pieces in gives.values() for piece in pieces}
    if len(gives) != len(ranks) or len(forms) != 1:
        return None
    members = groups_along(ranks, exchange.target_blocks.sizes, axes)
    pairs = [(other, rank) for rank in ranks for other in members[rank] if other != rank]
    # everyone must give the same to all: an all-gather cannot leave anybody out
    return gives if all(given.get((other, rank)) == gives[other] for other, rank in pairs) else None
