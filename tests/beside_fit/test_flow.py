"""Control flow in a layer: each primitive around each kind of body, trained, predicting and called."""

from __future__ import annotations

from typing import Any

import pytest

from tests.beside_fit.flow import BODIES, PRIMITIVES


def _outcomes(primitives: list[str], bodies: list[str], ways: list[str], layouts: list[str]) -> list[str]:
    import warnings

    from tests.beside_fit import flow

    warnings.simplefilter("ignore")  # what one device computes is said
    return flow.outcomes(primitives, bodies, ways, layouts, 4)


def test_branches_that_ended_the_process(on_ranks: Any) -> None:
    assert on_ranks("tensorflow")(_outcomes, ["cond", "switch"], ["reduces"], ["fit"], ["data"]) == []


@pytest.mark.full
@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_every_body(engine: str, primitive: str, on_ranks: Any) -> None:
    found = on_ranks(engine)(
        _outcomes, [primitive], list(BODIES), ["fit", "predict", "call"], ["data", "2x2"], timeout=900.0
    )
    assert found == []
