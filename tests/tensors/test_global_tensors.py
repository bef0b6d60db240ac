"""Global tensors on every engine: rows of the table, operators and their gradients, behaviour as arrays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import programs
from tests.sampling import each_on_one

BACKENDS = ("numpy", "jax", "tensorflow", "torch")
CHECKS = ("rows", "operators", "arrays", "engine")


#: normal numbers of one seed, to their last bit
DRAWN = (
    "0x1.49e6180000000p-2",
    "-0x1.c62e660000000p+0",
    "-0x1.e481a80000000p-3",
    "-0x1.40feb00000000p-2",
    "-0x1.1dc2860000000p+0",
    "0x1.64c8960000000p-4",
)


def check(name: str) -> None:
    from tests.tensors import worker  # its Keras is that of the ranks

    assert list(worker.CHECKS[name]()) == []


def drawn() -> list[str]:
    from tests.tensors import worker

    return worker.drawn()


@pytest.mark.parametrize(
    ("backend", "name"), [*(("numpy", name) for name in CHECKS), *each_on_one(BACKENDS[1:], CHECKS)]
)
def test_nothing_is_wrong(backend: str, name: str, on_ranks) -> None:
    on_ranks(backend)(check, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_are_those_of_every_engine(backend: str, on_ranks) -> None:
    assert tuple(on_ranks(backend)(drawn)) == DRAWN


DIFFERENT = """
import sys

import keras_flow as kf

def main(what):
    x = kf.rand(4, 4, placement=kf.Placement([0, 1]), sbp="S(0)", seed=1)
    rank = kf.env.get_rank()
    if what == "order":
        x = kf.ops.exp(kf.ops.sin(x)) if rank else kf.ops.sin(kf.ops.exp(x))
    for turn in range(250 if what == "long ago" else 0):
        x = x * (2.0 if rank and turn == 3 else 1.0)
    kf.ops.sum(x, axis=rank if what == "axis" else 0).numpy()

if __name__ == "__main__":
    kf.run(main, devices=2, timeout=60, args=(sys.argv[1],))
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "order",
            r"calls 'kf.ops.(exp|sin) of float32\[4, 4\] as \(S\(0\)\)' where another rank calls 'kf.ops.(exp|sin)",
        ),
        ("axis", r"as \(S\(0\)\), \{'axis': 0, 'keepdims': False\}"),
        ("long ago", r"calls before the last 200"),
    ],
)
def test_ranks_that_call_different_operators_are_told_so(tmp_path: Path, what: str, said: str) -> None:
    path = tmp_path / "different.py"
    path.write_text(DIFFERENT)
    code, _, err = programs.finish(programs.start([str(path), what], "torch"), 50)
    assert code != 0
    assert "ranks call different operators" in err
    assert re.search(said, err)


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
