"""In which rounds the messages of an exchange go on JAX: in a round each rank sends and receives one at most."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from keras_flow.boxing.cells import intersection, volume
from keras_flow.boxing.pieces import Transfer
from keras_flow.boxing.spec import Step

#: the messages of a round: (sender, receiver) -> what is in its message
Pairs = dict[tuple[int, int], list[Transfer]]


def _messages(step: Step, phase: str, ranks: tuple[int, ...]) -> Pairs:
    """The messages of a phase. Of ranks that hold copies the one sends that has least to send: fewer rounds."""
    copies = step.exchange.of_source.copy_axes if step.exchange.same_placement else ()
    messages: Pairs = {}
    load: Counter[int] = Counter()
    come = [part for rank in ranks for part in step.exchange.receives(rank, phase)]
    for part in sorted(come, key=lambda part: part.sender != part.receiver):
        sender = part.sender
        if copies and part.origin == "source" and sender != part.receiver:
            cells = step.exchange.of_source
            at = {axis: index for axis, index in cells.coords_of(sender).items() if axis not in copies}
            holders = [cells.rank_at(coords) for coords in cells.spread(tuple(range(len(cells.sizes))), at)]
            sender = min(holders, key=lambda rank: (load[rank], rank != part.sender))
        load[sender] += 1
        messages.setdefault((sender, part.receiver), []).append(part)
    return messages


def rounds(step: Step, phase: str, ranks: tuple[int, ...], key: Callable[[list[Transfer]], object]) -> list[Pairs]:
    """The messages of a phase in rounds, in which each rank sends and receives one message at most.

    The messages of a round have one key. What ranks have themselves is a round, without sending, where all ranks
    have such, or where those that have it receive from others besides; else it travels with the others: that
    costs less than telling the ranks that receive from those that do not.
    """
    messages = _messages(step, phase, ranks)
    place = {rank: number for number, rank in enumerate(ranks)}
    of_key: dict[object, Pairs] = {}
    for pair, message in messages.items():
        of_key.setdefault(key(message), {})[pair] = message
    ordered = []
    for left in of_key.values():
        own = {pair: message for pair, message in left.items() if pair[0] == pair[1]}
        receivers = {receiver for sender, receiver in left if sender != receiver}
        if len(own) == len(ranks) or all(receiver in receivers for _, receiver in own):
            ordered += [own] if own else []
            left = {pair: message for pair, message in left.items() if pair not in own}
        while left:
            found = _matching(list(left), place)
            ordered.append({pair: left.pop(pair) for pair in found})
    return ordered


def _matching(pairs: list[tuple[int, int]], place: Mapping[int, int]) -> list[tuple[int, int]]:
    """Most of these pairs (sender, receiver) that have each rank once on either side."""
    from scipy.sparse import coo_array  # JAX requires scipy
    from scipy.sparse.csgraph import maximum_bipartite_matching

    rows, columns = ([place[pair[end]] for pair in pairs] for end in (0, 1))
    graph = coo_array((np.ones(len(pairs)), (rows, columns)), shape=(len(place), len(place))).tocsr()
    sender = maximum_bipartite_matching(graph, perm_type="row")  # of each receiver, -1 where it has none
    return [pair for pair, row, column in zip(pairs, rows, columns, strict=True) if sender[column] == row]


@functools.lru_cache(maxsize=256)
def summed_blocks(step: Step) -> list[tuple[list[int], list[int]]] | None:
    """How a reduce-scatter can make the sums of an exchange whose every element ends on one rank.

    The ranks that hold the summands of one source cell make a group. Where as many target shards lie in the cell, each
    of the group sums one: its own where it can. What is summed elsewhere is sent on.

    Returns:
        The groups, each with the ranks for which its members make the sums; None where shards do not lie so, or where
        it would take more bytes than the step does.
    """
    source, target = step.exchange.of_source, step.exchange.of_target
    if not (step.exchange.same_placement and is_alike(step)) or source.classes == 1:
        return None
    if source.copies * target.copies * target.classes > 1:
        return None
    groups: dict[tuple[int, ...], list[int]] = {}
    ranks = step.exchange.source.placement.ranks
    for rank in ranks:
        at = source.coords_of(rank)
        groups.setdefault(tuple(at[axis] for axis in source.split_axes), []).append(rank)
    made, moved = [], 0
    boxes = {rank: target.box_at(target.coords_of(rank)) for rank in ranks}
    for group in groups.values():
        cell = source.box_at(source.coords_of(group[0]))
        inside = [rank for rank, box in boxes.items() if intersection(box, cell) == box]
        if len(inside) != len(group):
            return None
        others = iter([rank for rank in inside if rank not in group])
        made.append((group, [rank if rank in inside else next(others) for rank in group]))
        moved += sum(rank not in group for rank in inside)
    block = volume(boxes[ranks[0]])
    received = block * (len(ranks) * (source.classes - 1) + moved)
    return made if received <= sum(step.elements_received(rank) for rank in ranks) else None


def is_alike(step: Step) -> bool:
    """Whether all shards on each side are of one shape, and the same ranks hold them."""
    source, target = step.exchange.source, step.exchange.target
    one_group = set(source.placement.ranks) == set(target.placement.ranks)
    return one_group and source.divides and target.divides and 0 not in source.shape


def likeness(message: list[Transfer]) -> tuple:
    """What messages have in common that are cut and put by one program."""
    return tuple((part.origin, part.piece.lengths, part.piece.size) for part in message)


def elements(message: list[Transfer]) -> int:
    return sum(part.piece.size for part in message)
