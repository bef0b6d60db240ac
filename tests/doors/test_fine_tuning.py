"""Quantized models, adapters and thawed layers have one device's numbers under every layout, on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import sampling
from tests.doors import fine_tuning
from tests.doors.fine_tuning import Case
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
FIXED = (Case("int8", "before compile", "2x2"), Case("int4", "none", "1x2"), Case(None, "after compile", "2x2"))
ZERO = (Case("int8", "after compile", "zero=3"), Case(None, "before compile", "zero=3"))


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_fixed_part(engine: str, on_ranks: Callable[..., Pool]) -> None:
    assert on_ranks(engine)(fine_tuning.deviations, FIXED) == {}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch"])
def test_weights_that_are_held_split(engine: str, on_ranks: Callable[..., Pool]) -> None:
    assert on_ranks(engine)(fine_tuning.deviations, ZERO) == {}


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_combination(engine: str, on_ranks: Callable[..., Pool]) -> None:
    assert on_ranks(engine)(fine_tuning.deviations, fine_tuning.cases(), timeout=1800.0) == {}


@pytest.mark.parametrize(
    "engine", ["tensorflow", *(pytest.param(each, marks=pytest.mark.full) for each in ("jax", "torch"))]
)
def test_layers_that_were_frozen_when_they_were_laid(engine: str, on_ranks: Callable[..., Pool]) -> None:
    """A variable of TensorFlow has for life what gradient tapes see of it: Keras freezes by its own."""
    found = on_ranks(engine)(fine_tuning.thawed)
    assert max(found.values()) < 1e-5, found
