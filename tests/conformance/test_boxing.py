"""Every engine executes the same plans: what comes out is right, and what it moves is what the plan says."""

from __future__ import annotations

import pytest

from tests.jobs import LIMIT, Job

PART = "boxing"
#: plans with a seeded fault
FAULTS = ("wrong values", "wrong bytes")

pytestmark = pytest.mark.timeout(LIMIT)


@pytest.fixture(params=["jax", "tensorflow", "torch"])
def records(request: pytest.FixtureRequest, jobs: dict[str, Job]) -> list[dict]:
    """What an engine did with each pair of layouts; on torch of four processes."""
    return jobs[request.param].result(PART)  # type: ignore[return-value]


def test_plans_are_executed_right_and_move_what_they_say(records: list[dict]) -> None:
    pairs = [record for record in records if record["pair"] not in FAULTS]
    assert len(pairs) > 300
    assert [record["pair"] for record in pairs if not record["right"]] == []
    assert [record for record in pairs if record["moved"] != record["planned"]] == []


def test_wrong_plans_are_seen(records: list[dict]) -> None:
    values, moved = (next(record for record in records if record["pair"] == fault) for fault in FAULTS)
    assert not values["right"]
    assert moved["right"]
    assert moved["moved"] > moved["planned"]
