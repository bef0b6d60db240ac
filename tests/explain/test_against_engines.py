"""Explain is true: its bytes are those that each engine sends, counted by the engine's own means."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.explain import models
from tests.jobs import LIMIT, Job

pytestmark = pytest.mark.timeout(3 * LIMIT)

PART = "explain"
ENGINES = ("jax", "tensorflow", "torch")

CASES = [f"{name} {layout}" for name in models.MODELS for layout in models.LAYOUTS]


@pytest.fixture
def counted(jobs: dict[str, Job]) -> Callable[[str, str], dict]:
    """What explain said and what was counted, by engine and case."""
    return lambda engine, case: jobs[engine].case(PART, case)  # type: ignore[return-value]


def received(collectives: list[dict]) -> float:
    return sum(one["received"] for one in collectives)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_engine(engine: str, case: str, counted: Callable[[str, str], dict]) -> None:
    found = counted(engine, case)
    said, really = received(found["explained"]), received(found["counted"])
    assert abs(said - really) <= 0.1 * really, (said, really)


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_of_activations_one_by_one(engine: str, counted: Callable[[str, str], dict]) -> None:
    """Tensor parallel: the same collectives, not only the same sum."""
    for case in ("mlp tp4", "transformer tp4"):
        found = counted(engine, case)
        assert sorted(one["received"] for one in found["explained"]) == sorted(
            one["received"] for one in found["counted"] if one["received"]
        )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_peak_memory(engine: str, case: str, counted: Callable[[str, str], dict]) -> None:
    """Against XLA's buffer assignment, what torch's profiler sees allocated, what TensorFlow's allocator counts."""
    found = counted(engine, case)
    assert abs(found["peak explained"] - found["peak"]) <= 0.25 * found["peak"], found


def test_growth_of_tensorflows_process(counted: Callable[[str, str], dict]) -> None:
    """Of the first model with hundreds of megabytes; the allocator keeps what it once had."""
    found = counted("tensorflow", CASES[0])
    assert abs(found["peak explained"] - found["growth"]) <= 0.25 * found["growth"], found
