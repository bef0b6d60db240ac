"""What the parity grid does not show of torch, on four processes in one job."""

import ast

import pytest

from tests.backends.torch import checks
from tests.launch import programs

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    code, out, err = programs.finish(programs.start(["-m", "tests.backends.torch.checks"], "torch"), 110)
    assert code == 0, err
    lines = [line.partition(": ") for line in out.splitlines() if line.partition(": ")[0] in checks.CHECKS]
    return {name: ast.literal_eval(text) for name, _, text in lines}


@pytest.mark.parametrize("name", list(checks.CHECKS))
def test_check(name: str, outcome: dict[str, str]) -> None:
    assert outcome.get(name) == "ok"
