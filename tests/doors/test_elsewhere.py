"""Objects made elsewhere work where they are used, with their state, on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import sampling
from tests.doors import elsewhere
from tests.doors.elsewhere import Case
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
#: one for each kind that went wrong once, each place and each use
FIXED = (
    Case("metric", "before", "evaluate"),
    Case("metric", "before", "validation"),
    Case("model", "before", "validation", "2x2"),
    Case("metric in a closure", "before", "fit"),
    Case("loss", "before", "train_on_batch"),
    Case("weighted metrics", "in a plain fit", "evaluate"),
    Case("optimizer", "in a plain fit", "fit", "2x2"),
    Case("callback", "under another", "validation"),
    Case("seed generator", "before", "evaluate"),
    Case("layer", "under another", "a loop"),
    Case("metric", "under another", "a loop"),
)
_ALL = elsewhere.cases()
#: cases that share a start of an engine
_PART = 40


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_fixed_part(engine: str, on_ranks: Callable[..., Pool]) -> None:
    assert on_ranks(engine)(elsewhere.deviations, FIXED) == {}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_fixed_part_in_two_processes_of_jax(two_processes: Callable[[str, int], Pool]) -> None:
    assert two_processes("jax", 4).on_each(elsewhere.deviations, FIXED, timeout=550.0) == [{}, {}]


def test_a_step_and_an_update_are_of_one_mesh(on_ranks: Callable[..., Pool]) -> None:
    cases = (
        Case("variable", "under another", "evaluate", "2x2"),
        Case("loss", "under another", "fit", "2x2"),
        Case("layer", "in a plain fit", "a loop"),
    )
    assert on_ranks("tensorflow")(elsewhere.deviations, cases) == {}


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", range(-(-len(_ALL) // _PART)))
def test_every_combination(engine: str, part: int, on_ranks: Callable[..., Pool]) -> None:
    cases = _ALL[part * _PART : (part + 1) * _PART]
    cases = [case for case in cases if engine != "jax" or elsewhere.is_possible_on_jax(case)]
    assert on_ranks(engine)(elsewhere.deviations, cases, timeout=1200.0) == {}
