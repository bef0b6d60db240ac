"""Layers that wrap what an engine's own libraries make have one device's numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests import sampling
from tests.beside_fit import engine_layers

ENGINES = ("jax", "tensorflow", "torch")


def _outcomes(engine: str, cases: list[tuple[str, str, str, int]]) -> list[str]:
    import warnings

    warnings.simplefilter("ignore")  # that the wrapped is computed by the consistent view is said
    return engine_layers.outcomes(engine, cases)


def _all(engine: str) -> list[tuple[str, str, str, int]]:
    every = itertools.product(
        engine_layers.kinds(engine), engine_layers.MADE, engine_layers.LAYOUTS, engine_layers.ROWS
    )
    return [case for case in every if engine_layers.is_possible(engine, *case[:2])]


#: of all cases one in so many, chosen by its name
EVERY = {"jax": 8, "tensorflow": 12, "torch": 48}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sample_of_all(engine: str, on_ranks: Any) -> None:
    sample = [case for case in _all(engine) if sampling.is_chosen(f"wrapped {case} on {engine}", EVERY[engine])]
    assert sample
    assert on_ranks(engine)(_outcomes, engine, sample) == []


def test_a_saved_model_is_not_trained(on_ranks: Any) -> None:
    said = on_ranks("tensorflow")(engine_layers.refusal_of_training)
    assert said.startswith("(5, 3) layer 'tfsm_layer' of model ")
    assert "would not be trained. Set `trainable = False` on it before `compile`" in said


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("layout", engine_layers.LAYOUTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_all_of_a_layout(engine: str, layout: str, on_ranks: Any) -> None:
    cases = [case for case in _all(engine) if case[2] == layout]
    assert on_ranks(engine)(_outcomes, engine, cases, timeout=900.0) == []
