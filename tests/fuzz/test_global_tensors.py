"""Random programs of global tensors and chains of boxing plans, a fixed number of each.

On the numpy backend, and between two processes of three ranks, of which numpy judges each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

KINDS = ("programs", "gradients", "chains")


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    process = programs.start(["-m", "tests.fuzz.global_tensors", "--small"], "numpy")
    code, out, err = programs.finish(process, 100)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_are_right(kind: str, wrong: dict[str, str]) -> None:
    assert wrong[kind] == ""


#: how many programs of an engine, whose programs are compiled, take about half a minute
BETWEEN = {"tensorflow": 12, "jax": 3}


@sampling.one_in(3)
@pytest.mark.parametrize("backend", sampling.on_one(tuple(BETWEEN)))
def test_random_programs_between_processes_are_right(backend: str) -> None:
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--devices_per_proc", "3", "--timeout", "60"]
    command += ["-m", "tests.fuzz.global_tensors", "--kind", "programs", "--seed", "5", "--first", "6"]
    root = str(Path(__file__).parents[2])
    started = programs.start([*command, "--programs", str(BETWEEN[backend])], backend, PYTHONPATH=root)
    code, out, err = programs.finish(started, 200)
    assert code == 0, out + err[-4000:]
    assert f"{BETWEEN[backend]} run" in out
    assert ", 0 failed," in out
