"""The bound equals an exhaustive search over all ways to move and add the summands of one element, and its formula."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings

from keras_flow import sbp
from keras_flow.boxing import lower_bound
from keras_flow.layout import Layout
from tests.boxing.cases import all_nd_sbps, grid
from tests.boxing.test_planner import layouts

RANKS = range(4)


def fewest_receipts(held: tuple[int, ...], everything: int, members: list[tuple[int, ...]], limit: int) -> int:
    """Breadth first: a state is, for each rank, the set of sums (bit sets of summands) that it can hold.

    A receipt brings one sum that the sender has; a rank can add any disjoint sums of its own. It ends where each member
    can take a sum that all its copies hold, so that the members' sums make up the whole.

    Args:
        held: bit set of the summand that each rank holds.
        everything: bit set of all summands.
        members: the ranks that are copies of each member.
        limit: receipts after which the search gives up.
    """

    def closed(sums: frozenset[int]) -> frozenset[int]:
        found = set(sums)
        grown = True
        while grown:
            new = {a | b for a in found for b in found if not a & b} - found
            grown = bool(new)
            found |= new
        return frozenset(found)

    def lacking(state: tuple[frozenset[int], ...]) -> int:
        """Receipts that are needed at least: copies without the sum of their member, where members share in the best
        way."""

        def least(place: int, left: int) -> int:
            if place == len(members):
                return 0 if not left else 99
            best = least(place + 1, left)
            part = left
            while part:
                missing = sum(part not in state[rank] for rank in members[place])
                best = min(best, missing + least(place + 1, left & ~part))
                part = (part - 1) & left
            return best

        return least(0, everything)

    start = tuple(closed(frozenset({bits} if bits else ())) for bits in held)
    for allowed in range(limit + 1):
        level = {start}
        for left in range(allowed, -1, -1):
            level = {state for state in level if lacking(state) <= left}
            if any(lacking(state) == 0 for state in level):
                return allowed
            level = {
                (*state[:to], closed(state[to] | {sent}), *state[to + 1 :])
                for state in level
                for come, to in itertools.permutations(RANKS, 2)
                for sent in state[come] - state[to]
            }
    raise AssertionError(f"not within {limit} receipts")


@pytest.mark.parametrize("after", all_nd_sbps(2), ids=sbp.text)
def test_against_exhaustive_search(after):
    """One element per cell: a 2x2 tensor, so that every atom is one element."""
    mesh, remembered = grid((2, 2)), {}
    for before in all_nd_sbps(2):
        source, target = Layout(mesh, before, (4, 4)), Layout(mesh, after, (4, 4))
        found = 0
        for element in itertools.product(range(4), range(4)):
            held, members = [], {}
            for rank in RANKS:
                at = mesh.coordinates(rank)
                inside = [
                    all(part.start <= x < part.stop for x, part in zip(element, one.local_slices(rank), strict=True))
                    for one in (source, target)
                ]
                summand = tuple(at[axis] for axis, part in enumerate(before) if part == sbp.partial_sum)
                held.append(summand if inside[0] else None)
                if inside[1]:
                    member = tuple(at[axis] for axis, part in enumerate(after) if part == sbp.partial_sum)
                    members.setdefault(member, []).append(rank)
            numbers = {summand: 1 << k for k, summand in enumerate(sorted({one for one in held if one is not None}))}
            key = (tuple(numbers.get(one, 0) for one in held), tuple(sorted(map(tuple, members.values()))))
            if key not in remembered:
                remembered[key] = fewest_receipts(key[0], (1 << len(numbers)) - 1, list(key[1]), 6)
            found += remembered[key]
        assert lower_bound(source, target, "uint8") == found, (before, after)


def by_the_formula(source: Layout, target: Layout) -> int:
    """The bound as its docstring states it, element by element, from nothing but the layouts."""
    parts = zip(source.nd_sbp, source.placement.hierarchy, strict=True)
    p = math.prod(size for part, size in parts if part == sbp.partial_sum)

    def at(layout: Layout, rank: int, kind: sbp.Sbp) -> tuple[int, ...]:
        coordinates = zip(layout.placement.coordinates(rank), layout.nd_sbp, strict=True)
        return tuple(index for index, part in coordinates if part == kind)

    def having(layout: Layout, element: tuple[int, ...]) -> list[int]:
        return [
            rank
            for rank in layout.placement.ranks
            if all(
                x in range(part.start, part.stop) for x, part in zip(element, layout.local_slices(rank), strict=True)
            )
        ]

    total = 0
    for element in itertools.product(*map(range, source.shape)):
        held = {rank: at(source, rank, sbp.partial_sum) for rank in having(source, element)}
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in having(target, element):
            members.setdefault(at(target, rank, sbp.partial_sum), []).append(rank)
        m = len(next(iter(members.values())))
        summands = itertools.product(
            *(
                range(size)
                for part, size in zip(source.nd_sbp, source.placement.hierarchy, strict=True)
                if part == sbp.partial_sum
            )
        )
        lacking = sum(
            m - max(sum(held.get(rank) == one for rank in ranks) for ranks in members.values()) for one in summands
        )
        nobody = not any(rank in held for ranks in members.values() for rank in ranks)
        collected = p - 1 + m - 1 + nobody
        total += lacking if p == 1 else min(collected, lacking) if target.has_partial else collected
    return total


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_any_pair_has_the_bound_of_the_formula(pair):
    source, target = pair
    assert lower_bound(source, target, "uint8") == by_the_formula(source, target)


@pytest.mark.parametrize("hierarchy", [(2, 4), (2, 2, 2), (3, 2)])
def test_pairs_have_the_bound_of_the_formula(hierarchy):
    every = all_nd_sbps(len(hierarchy))
    for before, after in random.Random(1).sample([(one, other) for one in every for other in every], 80):
        source, target = (Layout(grid(hierarchy), one, (8, 5)) for one in (before, after))
        assert lower_bound(source, target, "uint8") == by_the_formula(source, target), (before, after)
