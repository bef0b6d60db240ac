"""What the ranks print, and where it goes."""

from pathlib import Path

import pytest

from keras_flow.launch.output import _lines
from tests.launch import programs

pytestmark = pytest.mark.timeout(60)

TALK = """
import os, sys
rank = os.environ['RANK']
for i in range(2000): print('line', i, rank)
print('bar 1', end='\\r'); print('bar 2', end='\\r'); print('é')
print('warned', rank, file=sys.stderr)
sys.stdout.write('no newline')
"""


def test_rank_0_is_shown_as_it_is_and_once(tmp_path: Path) -> None:
    code, out, err = programs.launch(programs.write(tmp_path, TALK), ranks=2)
    lines = "".join(f"line {i} 0\n" for i in range(2000))
    # text mode reads each carriage return as a newline
    assert (code, out, err) == (0, lines + "bar 1\nbar 2\né\nno newline", "warned 0\n")


def test_all_output_is_whole_and_every_line_says_its_rank(tmp_path: Path) -> None:
    code, out, err = programs.launch(programs.write(tmp_path, TALK), "--all-output", ranks=2)
    assert code == 0
    for rank in (0, 1):
        own = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        expected = [f"line {i} {rank}" for i in range(2000)] + ["bar 1", "bar 2", "é", "no newline"]
        assert own == [f"[rank {rank}] {line}" for line in expected]
    assert sorted(err.splitlines()) == ["[rank 0] warned 0", "[rank 1] warned 1"]


def test_lines_keep_blank_ones_and_wait_for_a_newline_cut_in_two() -> None:
    assert _lines("a\n\nb\r") == ["a\n", "\n", "b\r"]
    assert _lines("b\r\nc") == ["b\n", "c"]
