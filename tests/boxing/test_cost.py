"""What is counted in closed form is what the rules list one by one."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings

from keras_flow.boxing.arrivals import arrivals
from keras_flow.boxing.collectives import axis_by_axis, named_step
from keras_flow.boxing.cost import loads, total
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.phases import elements_received, receives
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from tests.boxing.cases import all_nd_sbps, grid
from tests.boxing.test_planner import layouts


def check(exchange: Exchange) -> bool:
    """Messages of every rank, what all receive, and what each receives; whether the last has a closed form."""
    received = []
    for rank in dict.fromkeys((*exchange.target.placement.ranks, *exchange.source.placement.ranks)):
        for phase in exchange.phases:
            listed = [(part.sender, part.piece.size) for part in receives(exchange, rank, phase) if part.sender != rank]
            senders, sizes = arrivals(exchange, rank, phase)
            assert sorted(listed) == sorted(zip(senders.tolist(), sizes.tolist(), strict=True)), (exchange, rank, phase)
        received.append(sum(elements_received(exchange, rank, phase) for phase in exchange.phases))
    assert total(exchange) == sum(received), exchange
    by_rank = loads(exchange)
    assert by_rank is None or by_rank.tolist() == received[: exchange.target.placement.size], exchange
    return by_rank is not None


@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (3, 1), (0, 4)])
def test_every_pair_on_2x2(shape):
    closed = 0
    for before, after in itertools.product(all_nd_sbps(2), repeat=2):
        source, target = Layout(grid((2, 2)), before, shape), Layout(grid((2, 2)), after, shape)
        closed += check(Exchange(source, target))
        step = named_step(source, target)
        if step is not None:
            check(step.exchange)
    assert closed >= 16 * 9 if shape == (8, 12) else closed


@pytest.mark.parametrize(
    ("hierarchy", "shape"), [((2, 3, 2), (24, 24)), ((2, 3, 2), (5, 7)), ((3, 4), (7, 11)), ((4, 3), (48, 24))]
)
def test_pairs_on_more_ranks(hierarchy, shape):
    every = all_nd_sbps(len(hierarchy))
    for before, after in random.Random(0).sample([(one, other) for one in every for other in every], 60):
        source, target = Layout(grid(hierarchy), before, shape), Layout(grid(hierarchy), after, shape)
        check(Exchange(source, target))
        for one, other in axis_by_axis(source, target, range(len(hierarchy))):
            unchanged = (axis for axis, (a, b) in enumerate(zip(one.nd_sbp, other.nd_sbp, strict=True)) if a == b)
            check(Exchange(one, other, tuple(unchanged)))


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_any_pair(pair):
    check(Exchange(*pair))


def test_ranks_far_apart():
    one, other = Placement([10**9, 3, 7, 1]), Placement([[7, 10**9], [5, 10**12]])
    for before, after in itertools.product(all_nd_sbps(1), all_nd_sbps(2)):
        check(Exchange(Layout(one, before, (8, 12)), Layout(other, after, (8, 12))))
        assert isinstance(total(Exchange(Layout(one, before, (8, 12)), Layout(other, after, (8, 12)))), int)
