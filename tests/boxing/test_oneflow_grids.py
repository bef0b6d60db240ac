"""The conversions of OneFlow's own test suite for eager and graph boxing, in full, with values of order 1.

Shapes, placements and layouts are those of `test_eager_boxing_exhaustive.py`, `test_eager_boxing.py` and the graph
tests of boxing (python/oneflow/test of Oneflow-Inc/oneflow 1.0); device types are only names in a plan: one stands for
all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from keras_flow import sbp
from keras_flow.boxing import plan, simulate
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from tests.boxing.cases import all_nd_sbps, families, logical_tensor, shards_of

S, B, P = sbp.split, sbp.broadcast, sbp.partial_sum
TWO_BY_TWO = [[0, 1], [2, 3]]
INTO = ([1], [3], [2, 3], [0, 1, 3])

Pair = tuple[Layout, Layout]


def pairs(shapes, ones, others, parts) -> Iterator[Pair]:
    """Every shape, placement before and after, and layout over `parts`."""
    for shape, one, other in itertools.product(shapes, map(Placement, ones), map(Placement, others)):
        for before, after in itertools.product(all_nd_sbps(one.ndim, parts), all_nd_sbps(other.ndim, parts)):
            yield Layout(one, before, shape), Layout(other, after, shape)


def exhaustive() -> Iterator[Pair]:
    """test_eager_boxing_exhaustive.py."""
    ones, others = ([0, 1], [1, 2, 3], [0, 1, 2, 3]), ([0, 1, 3], [0, 1, 2, 3])
    yield from pairs([(4, 4), (6, 8), (5, 7)], ones, others, (S(0), S(1), B, P))
    yield from pairs([(8, 8, 16)], [TWO_BY_TWO], [TWO_BY_TWO], (S(0), S(1), B, P))
    yield from pairs([(4, 4, 5, 7)], ones, others, (S(2), S(3), B, P))
    yield from pairs([(4, 8, 4, 8, 4)], [TWO_BY_TWO], [TWO_BY_TWO], (S(2), S(4), B, P))


def relations() -> Iterator[Pair]:
    """The fixed-value class of test_eager_boxing.py, naive S to S, dim-reduce and other dimensions of a placement."""
    placements = [
        ([0, 1], [2, 3]),
        ([0, 1, 3], [2, 3]),
        ([0, 1, 3], [1, 3]),
        ([0, 2, 1, 3], [1, 3]),
        ([0, 1, 3], [0, 1, 2, 3]),
        ([0, 1], [0, 1, 2, 3]),
        ([0, 1, 3], [0, 1, 3]),
    ]
    for one, other in placements:
        yield from pairs([(4, 4), (12, 6), (4, 18)], [one], [other], (S(0), S(1), B, P))
    yield from pairs([(12, 12), (18, 24), (12, 18, 24)], ([0, 1], [1, 2, 3]), INTO, (S(0), S(1), B, P))
    yield from pairs([(25, 33), (13, 17)], [[0, 1, 2, 3]], [[0, 1, 2, 3]], (S(0), S(1), B))
    yield from pairs([(16, 32)], [[[0]]], [TWO_BY_TWO], (S(0), S(1), B))
    yield from pairs([(4, 8)], [[0, 1, 2, 3]], [TWO_BY_TWO], (S(0), S(1), B, P))
    yield from pairs([(4,)], [[0]], [TWO_BY_TWO], (S(0), B))


def empty() -> Iterator[Pair]:
    """Tensors without elements."""
    ones, others = ([0, 1], [1, 2, 3], [0, 1, 2, 3]), (*INTO, [0, 1, 2, 3])
    yield from pairs([(8, 0, 4), (5, 0, 7)], ones, others, (S(0), S(2), B, P))


def asymmetric() -> Iterator[Pair]:
    """1-D and 2-D placements of other ranks, even and uneven."""
    ones = ([2], [0, 1], [1, 2, 3], [0, 1, 2, 3], [[0, 1, 2, 3]], TWO_BY_TWO)
    others = (*INTO, [0, 1, 2, 3], [[2], [3]], TWO_BY_TWO)
    yield from pairs([(12, 24), (17, 13, 19)], ones, others, (S(0), S(1), B, P))


def graph() -> Iterator[Pair]:
    """The graph tests: comb2d, comb1to2d, gbc2d, gbc1to2d, gbc2to1d, gbc2to2d, nccl_logical_send_recv."""
    parts = (S(0), S(1), S(2), B, P)
    yield from pairs([(4, 4, 4)], [TWO_BY_TWO], [TWO_BY_TWO], parts)
    yield from pairs([(4, 4, 4)], ([0, 1, 2, 3], [0, 1, 2]), [TWO_BY_TWO], parts)
    yield from pairs([(4, 4, 4)], [TWO_BY_TWO], ([0, 1, 2, 3], [0, 1, 2]), parts)
    yield from pairs([(4, 5)], [TWO_BY_TWO], [TWO_BY_TWO], (S(0), S(1), B, P))
    yield from pairs([(4, 14)], [[0, 1, 2]], [[[3, 0], [1, 2]]], (S(0), S(1), B))
    yield from pairs([(13, 5)], [TWO_BY_TWO], [[0, 3, 4]], (S(0), S(1), B, P))
    yield from pairs([(12, 12)], [TWO_BY_TWO], [[[0, 3, 4], [2, 5, 6]]], (S(0), S(1), B, P))
    yield from pairs([(2, 2, 2)], [[0, 1]], [[0, 1]], parts)


@pytest.mark.parametrize(
    "generator", [exhaustive, relations, empty, pytest.param(asymmetric, marks=pytest.mark.full), graph]
)
def test_values(generator) -> None:
    for source, target in generator():
        logical = logical_tensor(source.shape)
        out = simulate(plan(source, target, "float64"), shards_of(source, logical))
        assert set(out) == set(target.placement.ranks)
        for ranks, slices in families(target):
            assert np.array_equal(sum(out[rank] for rank in ranks), logical[slices]), (source, target)
