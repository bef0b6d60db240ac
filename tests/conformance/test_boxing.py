"""Every engine executes the same plans: what comes out is right, and what it moves is what the plan says."""

from __future__ import annotations

import pytest

from tests.jobs import LIMIT, Job

PART = "boxing"
FAULT = "seeded fault"

pytestmark = pytest.mark.timeout(LIMIT)


@pytest.fixture(params=["jax", "tensorflow", "torch"])
def records(request: pytest.FixtureRequest, jobs: dict[str, Job]) -> list[dict]:
    """What an engine did with each pair of layouts; on torch of four processes."""
    return jobs[request.param].result(PART)  # type: ignore[return-value]


def test_plans_are_executed_right_and_move_what_they_say(records: list[dict]) -> None:
    pairs = [record for record in records if record["pair"] != FAULT]
    assert len(pairs) > 300
    assert [record["pair"] for record in pairs if not record["right"]] == []
    assert [record for record in pairs if record["moved"] != record["planned"]] == []


def test_a_wrong_plan_is_seen(records: list[dict]) -> None:
    (fault,) = [record for record in records if record["pair"] == FAULT]
    assert not fault["right"]
