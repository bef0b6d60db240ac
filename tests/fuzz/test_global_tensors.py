"""Random programs of global tensors and chains of boxing plans, a fixed number of each, on the numpy backend."""

from __future__ import annotations

import json

import pytest

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
