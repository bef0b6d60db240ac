"""Global tensors in details that do not depend on the engine, on numpy."""

from __future__ import annotations

import json

import pytest

from keras_flow.signatures import table
from keras_flow.tensors.dispatch import DECOMPOSITIONS
from tests.launch import programs
from tests.tensors.cases import CASES, EVERY_NAME
from tests.tensors.checks import CHECKS


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    code, out, err = programs.finish(programs.start(["-m", "tests.tensors.checks"], "numpy"), 100)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_wrong(check: str, wrong: dict[str, str]) -> None:
    assert wrong[check] == ""


def test_every_name_has_a_case() -> None:
    names = {case.name for case in (*CASES, *EVERY_NAME)}
    indices = {"getitem", "setitem"}  # see `worker.wrong_arrays`
    assert set(table.RULES) | set(DECOMPOSITIONS) == names | indices
