"""What the parity grid does not show of the TensorFlow backend, in one process with its own virtual devices."""

import ast

import pytest

from tests.launch import programs

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.timeout(300)
NAMES = ("created_sharded", "steps", "layouts", "operations", "mirrored")


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    command = ["-m", "tests.backends.tensorflow.programs"]
    code, out, err = programs.finish(programs.start(command, "tensorflow", TF_CPP_MIN_LOG_LEVEL="3"), 290)
    assert code == 0, err
    lines = [line.partition(": ") for line in out.splitlines() if line.partition(": ")[0] in NAMES]
    return {name: ast.literal_eval(text) for name, _, text in lines}


@pytest.mark.parametrize("name", NAMES)
def test_program(name: str, outcome: dict[str, str]) -> None:
    assert outcome.get(name) == "ok", outcome.get(name)
