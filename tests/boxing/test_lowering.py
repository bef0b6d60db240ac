"""What JAX runs instead of an exchange: the same values and bytes, by collectives where there are any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from keras_flow.boxing import BoxingPlan, lowering, plan, simulate
from keras_flow.layout import Layout
from tests.boxing import test_independent
from tests.boxing.cases import all_nd_sbps, families, grid, logical_tensor, shards_of


def lowered(hierarchy: tuple[int, ...], shape: tuple[int, ...]):
    """Every plan between layouts on a placement, and what becomes of it."""
    for before, after in itertools.product(all_nd_sbps(len(hierarchy)), repeat=2):
        made = plan(Layout(grid(hierarchy), before, shape), Layout(grid(hierarchy), after, shape), "float64")
        yield made, lowering.lower(made)


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 4)])
def test_the_same_values_and_bytes(hierarchy):
    """Also with axes in another order on the way, or an axis of 4 as two of 2."""
    logical = logical_tensor((8, 16))
    transposed = finer = 0
    for made, lower in lowered(hierarchy, (8, 16)):
        assert lower.total_bytes == made.total_bytes
        shards = shards_of(made.source, logical)
        for step in lower.steps:
            source, target = step.exchange.source, step.exchange.target
            transposed += source.placement != target.placement
            finer += source.placement.ndim > len(hierarchy)
            shards = simulate(BoxingPlan(source, target, "float64", (step,)), shards)
        for summands, slices in families(made.target):
            assert np.array_equal(sum(shards[rank] for rank in summands), logical[slices]), lower
    assert transposed
    assert bool(finer) == (4 in hierarchy)


def test_the_executor_of_the_specification_runs_what_it_is_lowered_to():
    for _, lower in lowered((2, 2), (8, 12)):
        test_independent.check(lower)


def test_groups_along_axes_of_an_exchange():
    """Steps that leave axes as they are, on placements with finer axes."""
    apart = 0
    for _, lower in lowered((2, 4), (8, 16)):
        apart += any(step.kind == "exchange" and step.exchange.apart for step in lower.steps)
        test_independent.check(lower)
    assert apart


def test_explain_says_what_jax_runs():
    mesh = grid((2, 2))
    text = plan(Layout(mesh, "P,S(0)", (8, 4)), Layout(mesh, "S(0),S(0)", (8, 4))).explain()
    assert "\n1. exchange: " in text
    says = "then permute to the order of axes axis0, axis1 (as many bytes, at most 64 B by one rank)"
    assert f"\non JAX: reduce_scatter in groups along axis0: S(0),P -> S(0),S(0), {says}\n" in text
    assert "on JAX" not in plan(Layout(mesh, "S(0),B", (8, 4)), Layout(mesh, "B,S(0)", (8, 4))).explain()
