"""Global tensors on every engine: rows of the table, operators and their gradients, behaviour as arrays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import LIMIT, Job
from tests.launch import programs

BACKENDS = ("numpy", "jax", "tensorflow", "torch")

PART = "tensors"

pytestmark = pytest.mark.timeout(LIMIT)


@pytest.mark.parametrize("check", ["rows", "operators", "arrays", "engine"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_wrong(backend: str, check: str, jobs: dict[str, Job]) -> None:
    assert jobs[backend].result(PART)[check] == []  # type: ignore[index]


@pytest.mark.timeout(3 * LIMIT)
def test_draws_are_those_of_every_engine(jobs: dict[str, Job]) -> None:
    draws = {backend: jobs[backend].result(PART)["draws"] for backend in BACKENDS}  # type: ignore[index]
    assert all(one == draws["numpy"] for one in draws.values())


DIFFERENT = """
import keras_flow as kf

def main():
    x = kf.rand(8, 4, placement=kf.Placement([0, 1]), sbp="S(0)", seed=1)
    if kf.env.get_rank():
        x = kf.ops.exp(x)
    kf.ops.sum(x).numpy()

if __name__ == "__main__":
    kf.run(main, devices=2, timeout=60)
"""


def test_ranks_that_call_different_operators_are_told_so(tmp_path: Path) -> None:
    path = tmp_path / "different.py"
    path.write_text(DIFFERENT)
    code, _, err = programs.finish(programs.start([str(path)], "torch"), 50)
    assert code != 0
    assert "ranks call different operators" in err
    assert "kf.ops.exp" in err


def test_a_wrong_row_is_seen() -> None:
    """The check of rows can fail: a row that says that P passes through exp."""
    program = """
from keras_flow.sbp import partial_sum as P
from keras_flow.signatures import Row, table
from tests.tensors import worker
rule = table.RULES["exp"]
table.RULES["exp"] = lambda call: [*rule(call), Row((P,), (P,))]
print(sorted(set(text.split()[0] for text in worker.wrong_rows())))
"""
    code, out, err = programs.finish(programs.start(["-c", program], "numpy"), 100)
    assert code == 0, err
    assert out.strip() == "['exp']"
