"""Every engine executes the same plans: what comes out is right, and what it moves is what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: seconds; a worker takes 20 to 50
_LIMIT = 400

FAULT = "seeded fault"


@pytest.fixture(scope="module", params=["jax", "tensorflow", "torch"])
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What an engine did with each pair of layouts; on torch of four processes."""
    path: Path = tmp_path_factory.mktemp("boxing") / f"{request.param}.json"
    command = [sys.executable, "-m", "tests.conformance.boxing_worker", request.param, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


def test_plans_are_executed_right_and_move_what_they_say(records: list[dict]) -> None:
    pairs = [record for record in records if record["pair"] != FAULT]
    assert len(pairs) > 300
    assert [record["pair"] for record in pairs if not record["right"]] == []
    assert [record for record in pairs if record["moved"] != record["planned"]] == []


def test_a_wrong_plan_is_seen(records: list[dict]) -> None:
    (fault,) = [record for record in records if record["pair"] == FAULT]
    assert not fault["right"]
