"""Control flow in a layer: each primitive around each kind of body, called, predicting, evaluated and trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sampling
from tests.beside_fit.flow import BODIES, CASES, PRIMITIVES, ROWS

ENGINES = ("jax", "tensorflow", "torch")
#: of torch's four processes two are outside of 1x2, and compute alone
LAYOUTS = ("data", "1x2", "2x2")
#: of the cases one in so many is run each day on an engine, under one layout and number of rows
EVERY = {"jax": 6, "tensorflow": 10, "torch": 10}


def _outcomes(engine_cases: list[tuple[tuple[str, str], list[str], list[int]]]) -> list[str]:
    """What is wrong, or refused where one device computes it."""
    import warnings

    from tests.beside_fit import flow

    warnings.simplefilter("ignore")  # what one device computes is said
    wrong = []
    for case, layouts, rows in engine_cases:
        for found in flow.outcomes([case], layouts, rows, 4):
            wrong += found
    return wrong


def test_branches_that_ended_the_process(on_ranks: Any) -> None:
    cases = [((primitive, "reduces"), ["data"], [8]) for primitive in ("cond", "switch")]
    assert on_ranks("tensorflow")(_outcomes, cases) == []


def test_processes_outside_of_the_placement_make_the_same_calls(on_ranks: Any) -> None:
    cases = [(("cond", "row-wise"), ["1x2"], [8]), (("map_rows", "assigns"), ["1x2"], [6])]
    cases += [(("own_cond", "reduces"), ["1x2"], [8])]  # torch compiles both branches, with DTensors it cannot
    assert on_ranks("torch").on_each(_outcomes, cases) == [[]] * 4


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_sample_of_all(engine: str, on_ranks: Any) -> None:
    sample = []
    for primitive, body in CASES:
        name = f"{primitive} {body} on {engine}"
        if sampling.is_chosen(name, EVERY[engine]):
            layout, rows = sampling.chosen(name, LAYOUTS), sampling.chosen(name[::-1], ROWS)
            sample.append(((primitive, body), [layout], [rows]))
    assert len(sample) > 4
    assert on_ranks(engine)(_outcomes, sample) == []


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_body(engine: str, primitive: str, on_ranks: Any) -> None:
    cases = [((primitive, body), list(LAYOUTS), list(ROWS)) for body in BODIES]
    assert on_ranks(engine)(_outcomes, cases, timeout=900.0) == []
