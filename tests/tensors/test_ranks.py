"""Ranks of several processes that call different operators: each is told so, and none waits for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import programs

PROGRAM = """
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
    ("what", "message"),
    [
        (
            "order",
            r"kf.ops.(exp|sin) of float32\[4, 4\] as \(S\(0\)\) \(different.py, line 10\) needs all ranks: rank \d "
            r"called it, where rank \d is in kf.ops.(exp|sin)",
        ),
        ("axis", r"as \(S\(0\)\), \{'axis': \d, 'keepdims': False\} \(different.py, line 13\) needs all ranks"),
        ("long ago", r"needs all ranks: rank \d and rank \d made different calls, more than 50 before it"),
    ],
)
def test_ranks_that_call_different_operators_are_told_so(tmp_path: Path, what: str, message: str) -> None:
    path = tmp_path / "different.py"
    path.write_text(PROGRAM)
    code, _, err = programs.finish(programs.start([str(path), what], "torch"), 50)
    assert code != 0
    assert re.search(message, " ".join(err.split()))
