"""Cost: elements that ranks receive, counted without listing messages.

- `total`: all ranks together, which is also the lower bound.
- `loads`: each rank, where that has a closed form.
- `of_collective`: a named collective, from the sizes of shards and groups.

Messages one by one are in `phases.py`, those of one rank as arrays in `arrivals.py`; tests/boxing/test_cost.py compares
every count with them. Here numpy arrays have one entry for each rank of the target, so that counting for 65,536 ranks
takes milliseconds.

Example: `P,S(0) -> S(0),B` on ranks [[0, 1], [2, 3]]. Ranks 0 and 2 hold the two summands of the upper rows, 1 and 3
those of the lower; ranks 0 and 1 want the upper rows. So rank 0 receives the other summand of the upper rows and adds
it (8 elements), rank 1 receives the sum (8 elements); ranks 2 and 3 do likewise with the lower rows.

    >>> from keras_flow.layout import Layout
    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> exchange = Exchange(Layout(mesh, "P,S(0)", (4, 4)), Layout(mesh, "S(0),B", (4, 4)))
    >>> total(exchange), loads(exchange).tolist()
    (32, [8, 8, 8, 8])
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from keras_flow.boxing.exchange import Exchange
from keras_flow.layout import Layout

Array = np.ndarray


def total(exchange: Exchange) -> int:
    """Elements that all ranks together receive.

    With p summands and m families an element takes p - 1 + m - 1 receipts where one of its destinations holds a
    summand, else one more, or, with a P in the target, as many as `merge` takes if these are fewer. So only atoms that
    some destination holds have to be looked at one by one. Each of them has a rank of the target that holds it: there
    are no more of them than ranks.
    """
    at = _TargetRanks(exchange)
    if exchange.summand_count == 1 and not exchange.member_axes:
        return int((at.wanted - at.common).sum())
    # receipts of an element: p - 1 to add it at one destination, m - 1 for the others; one more is in the return
    families, summands = exchange.family_count, exchange.summand_count
    one_sum = summands + families - 2
    holding = np.flatnonzero(at.common)
    receipts = np.full(0, one_sum)
    if holding.size:
        # per atom the receipts of `merge`: copies of the keeping members that do not hold the summand that they keep
        missing = families * summands - _held_by_keepers(exchange, at, holding)
        if summands == 1:
            receipts = missing
        else:
            receipts = np.minimum(missing, one_sum) if exchange.member_axes else np.full_like(missing, one_sum)
    # a rank that holds an atom has all of it, so its `common` is the atom's volume; one such rank for each atom
    volumes = at.common[holding][np.unique(at.atom[holding], return_index=True)[1]]
    held_elements = sum(int(count) * int(volumes[receipts == count].sum()) for count in np.unique(receipts))
    # each coordinate on an axis of `apart` wants the tensor for itself, unless the axis splits it
    groups = exchange.target_blocks.sizes_of(
        axis for axis in exchange.apart if axis not in exchange.target_blocks.split_axes
    )
    elements = math.prod(exchange.source.shape) * groups
    return (one_sum + 1) * (elements - int(volumes.sum())) + held_elements


def _held_by_keepers(exchange: Exchange, at: _TargetRanks, holding: Array) -> Array:
    """Copies of keeping members that hold their summand, over all summands, for each atom that a destination holds.

    Three group-bys over the ranks that hold an atom: count the copies of each (atom, summand, member), take the largest
    count among the members, which is the member that keeps the summand, and add these over the summands. Numbers that
    are composed of atom, summand and member make a group consecutive once they are sorted, which `np.unique` does.
    """
    source, target = exchange.source_blocks, exchange.target_blocks
    members = target.sizes_of(exchange.member_axes)
    of_summand = at.atom * source.summands + at.in_source(source.partial_axes)
    of_member = of_summand * members + at.in_target(exchange.member_axes)
    # e.g. 2 copies of member 0 and 1 of member 1 hold summand 0 of an atom: [2, 1], of which member 0 keeps it
    of_member, copies = np.unique(of_member[holding], return_counts=True)
    of_summand, first = np.unique(of_member // members, return_index=True)
    most = np.maximum.reduceat(copies, first)
    _, first = np.unique(of_summand // source.summands, return_index=True)
    return np.add.reduceat(most, first)


def loads(exchange: Exchange) -> Array | None:
    """[ranks of the target]: elements that each receives, in order; None where there is no closed form.

    There is none with a P in the target, and where an atom that no destination holds is cut into ranges of several
    lengths.
    """
    if exchange.member_axes:
        return None
    at = _TargetRanks(exchange)
    if exchange.summand_count == 1:
        return at.wanted - at.common
    # owners of an atom are the ranks of its target block that hold a summand of it, in order
    holding = np.flatnonzero(at.common > 0)
    _, first, atom, owners = np.unique(at.atom[holding], return_index=True, return_inverse=True, return_counts=True)
    # the place of each holder among the owners of its atom
    order = np.argsort(atom, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(owners) - owners, owners)
    # e.g. 5 elements over 2 owners are ranges of 3 and 2: the earlier rank has the longer one
    owned_and_held = np.zeros_like(at.wanted)
    owned_and_held[holding] = block_length(at.common[holding], owners[atom], place)
    # atoms of a target block that none of its destinations holds are divided among all of them
    # elements of each target block that any of its ranks holds: the atoms' volumes, added by block
    held_of_block = np.bincount(at.block[holding[first]], at.common[holding[first]], minlength=int(at.block.max()) + 1)
    not_held = at.wanted - held_of_block.astype(np.int64)[at.block]
    # the ranges of one length only if all atoms divide by the number of ranks that want them
    if not_held.any() and _smallest_atom(exchange) % exchange.family_count:
        return None
    owned = owned_and_held + not_held // exchange.family_count
    # an owner receives all summands of its ranges but those it holds, any destination the ranges of the other owners
    return exchange.summand_count * owned - owned_and_held + (at.wanted - owned)


def of_collective(kind: str, exchange: Exchange) -> tuple[int, int] | None:
    """Elements that a named collective between layouts that divide receives: of all ranks, and of the most loaded one.

    The counts of the usual ring or pairwise algorithms, for groups of n ranks and shards of s elements: (n - 1) s of an
    all-gather and (n - 1)/n s of an all-to-all, where s is the source's shard; (n - 1) s of a reduce-scatter, where it
    is the target's; 2 (n - 1)/n s of an all-reduce.

    Returns:
        None for an all-reduce whose shards do not divide by the group: its ranges are of two lengths.
    """
    source, target = exchange.source, exchange.target
    group = math.prod(size for axis, size in enumerate(source.placement.hierarchy) if axis not in exchange.apart)
    if kind == "permute":  # blocks are the same or have no element in common: a rank receives a whole shard or nothing
        return total(exchange), shard_size(source)
    if kind == "all_gather":
        each = (group - 1) * shard_size(source)
    elif kind == "reduce_scatter":
        each = (group - 1) * shard_size(target)
    elif kind == "all_to_all":
        each = shard_size(source) // group * (group - 1)
    elif kind == "all_reduce":
        # the search needs the largest load exactly, and such a chain would load ranks differently
        if shard_size(source) % group:
            return None
        each = 2 * (group - 1) * shard_size(source) // group
    else:
        assert kind in ("local_slice", "local_keep"), kind
        each = 0
    return source.placement.size * each, each


def shard_size(layout: Layout) -> int:
    """Elements of a shard of a layout that divides."""
    return math.prod(n // layout.parts_of_dim(dim) for dim, n in enumerate(layout.shape))


def block_length(length: Array, parts: Array | int, index: Array | int) -> Array:
    """The length of a block of the balanced split rule, `kf.layout.balanced` for arrays."""
    return length // parts + (index < length % parts)


def _smallest_atom(exchange: Exchange) -> int:
    """Elements of which the volume of every atom is a multiple."""
    size = 1
    for dim, length in enumerate(exchange.source.shape):
        parts = math.lcm(exchange.source.parts_of_dim(dim), exchange.target.parts_of_dim(dim))
        size *= length // parts if length % parts == 0 else 1
    return size


class _TargetRanks:
    """Arrays with an entry for each rank of the target, in order.

    Attributes:
        wanted: elements of its target block.
        common: those of them that it holds itself.
        block: number of its target block (and group, where groups work apart).
        atom: number of the atom of its target block and its source block.
    """

    def __init__(self, exchange: Exchange):
        self.source, self.target = exchange.source_blocks, exchange.target_blocks
        # coordinates as sparse arrays, one array dim for each axis: numpy broadcasts them where they are combined
        self.target_coords = self.source_coords = np.indices(self.target.sizes, sparse=True)
        is_in_source: Array | bool = True
        if not exchange.same_placement:
            ranks, wanting = exchange.source_ranks, np.reshape(exchange.target.placement.ranks, self.target.sizes)
            # position of each rank of the target among those of the source, by binary search
            order = np.argsort(ranks)
            position = order[np.minimum(np.searchsorted(ranks, wanting, sorter=order), len(ranks) - 1)]
            self.source_coords = np.unravel_index(position, self.source.sizes)
            is_in_source = ranks[position] == wanting
        wanted, common = np.ones((), np.int64), np.asarray(is_in_source, np.int64)
        for dim in range(len(exchange.source.shape)):
            held_start, held_stop = self.source.bounds_at(dim, self.source_coords)
            start, stop = self.target.bounds_at(dim, self.target_coords)
            wanted = wanted * (stop - start)
            common = common * np.maximum(np.minimum(stop, held_stop) - np.maximum(start, held_start), 0)
        self.wanted, self.common = self._per_rank(wanted), self._per_rank(common)
        self.block = self.in_target(dict.fromkeys((*self.target.split_axes, *exchange.apart)))
        split = self.source.split_axes
        self.atom = self.block * self.source.sizes_of(split) + self.in_source(split)

    def _per_rank(self, values: Array | int) -> Array:
        return np.broadcast_to(values, self.target.sizes).reshape(-1)

    def in_source(self, axes: Iterable[int]) -> Array:
        """Numbers of the coordinates on axes of the source; without meaning where the rank is not in it."""
        return self._per_rank(self.source.number(axes, self.source_coords))

    def in_target(self, axes: Iterable[int]) -> Array:
        """Numbers of the coordinates on axes of the target."""
        return self._per_rank(self.target.number(axes, self.target_coords))
