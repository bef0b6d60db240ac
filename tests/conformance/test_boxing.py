"""Every engine executes the same plans: what comes out is right, and what it moves is what the plan says."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import sampling
from tests.ranks import CALL, Pool

#: plans with a seeded fault
FAULTS = ("wrong values", "wrong bytes")


def run() -> list[dict]:
    from tests.conformance import boxing_worker

    return boxing_worker.main()


@pytest.fixture(scope="module")
def records(on_ranks) -> Callable[[str], list[dict]]:
    """What an engine did with each pair of layouts; on torch of four processes."""
    return functools.cache(lambda backend: on_ranks(backend)(run))


BACKENDS = pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow", "torch")))


@BACKENDS
def test_plans_are_executed_right_and_move_what_they_say(backend: str, records) -> None:
    pairs = [record for record in records(backend) if record["pair"] not in FAULTS]
    assert len(pairs) > 300
    assert [record["pair"] for record in pairs if not record["right"]] == []
    assert [record for record in pairs if record["moved"] != record["planned"]] == []


@BACKENDS
def test_wrong_plans_are_seen(backend: str, records) -> None:
    values, moved = (next(record for record in records(backend) if record["pair"] == fault) for fault in FAULTS)
    assert not values["right"]
    assert moved["right"]
    assert moved["moved"] > moved["planned"]


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What JAX did with eight ranks."""
    out: Path = tmp_path_factory.mktemp("eight") / "out.json"
    command = [sys.executable, "-m", "tests.conformance.eight_ranks", str(out)]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL, env=environment)
    assert out.exists(), done.stderr[-4000:]
    return json.loads(out.read_text())


def test_eight_ranks_of_jax_execute_plans_right(eight_ranks: dict) -> None:
    pairs = eight_ranks["records"]
    assert [record["pair"] for record in pairs if not record["right"]] == []
    assert [record for record in pairs if record["moved"] != record["planned"]] == []


def test_loops_are_not_cut_where_devices_keep_all_cores_busy(eight_ranks: dict) -> None:
    has_idle_cores = (os.cpu_count() or 1) > 8
    assert eight_ranks["parallel tasks"] == {"ours": has_idle_cores, "plain": True}


@pytest.mark.full
def test_truths_of_256_ranks_are_added_right(tmp_path: Path) -> None:
    def program() -> bool:
        import keras_flow as kf

        summand = np.ones(4, "bool")
        total = kf.to_global(dict.fromkeys(range(256), summand), kf.Placement(range(256)), "P")
        return bool(total.to_global(sbp="B").numpy().all())

    pool = Pool("jax", tmp_path, ranks=256)
    try:
        assert pool(program)
    finally:
        pool.close()


@sampling.one_in(3)
def test_tensorflow_sends_between_processes_what_the_plan_says() -> None:
    command = [sys.executable, "-m", "keras_flow.launch", "--nproc_per_node", "2", "--devices_per_proc", "2"]
    command += ["--timeout", "60", "-m", "tests.conformance.processes_job"]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    for process in json.loads(done.stdout.splitlines()[-1]):
        assert process["wrong"] == []
        assert process["sent"] == process["planned"] > 0
