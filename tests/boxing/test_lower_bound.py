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


def fewest_receipts(held: tuple[int, ...], everything: int, families: list[tuple[int, ...]], limit: int) -> int:
    """Breadth first: a state is, for each rank, the set of sums (bit sets of summands) that it can hold.

    A receipt brings one sum that the sender has; a rank can add any disjoint sums of its own. It ends where in each
    family the ranks can choose sums that make up the whole.
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
        """Families that are not done: each needs one more receipt at least."""
        count = 0
        for family in families:
            reached = {0}
            for rank in family:
                reached |= {have | own for have in reached for own in state[rank] if not have & own}
            count += everything not in reached
        return count

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
            held, families = [], {}
            for rank in RANKS:
                at = mesh.coordinates(rank)
                inside = [
                    all(part.start <= x < part.stop for x, part in zip(element, one.local_slices(rank), strict=True))
                    for one in (source, target)
                ]
                summand = tuple(at[axis] for axis, part in enumerate(before) if part == sbp.partial_sum)
                held.append(summand if inside[0] else None)
                if inside[1]:
                    copy = tuple(at[axis] for axis, part in enumerate(after) if part == sbp.broadcast)
                    families.setdefault(copy, []).append(rank)
            numbers = {summand: 1 << k for k, summand in enumerate(sorted({one for one in held if one is not None}))}
            key = (tuple(numbers.get(one, 0) for one in held), tuple(sorted(map(tuple, families.values()))))
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
        families: dict[tuple[int, ...], list[int]] = {}
        for rank in having(target, element):
            families.setdefault(at(target, rank, sbp.broadcast), []).append(rank)
        lacking = [p - len({held[rank] for rank in family if rank in held}) for family in families.values()]
        collected = p - 1 + len(families) - 1 + (min(lacking) == p)
        total += sum(lacking) if p == 1 else min(collected, sum(lacking)) if target.has_partial else collected
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
