"""What the ranks print, and where it goes."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from keras_flow.errors import LaunchError
from keras_flow.launch.output import RankOutput, Shown, _lines
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


def followed(command: str, shown: Shown) -> RankOutput:
    """What a shell prints, once it has ended by itself."""
    output = RankOutput(0, shown)
    stdout, stderr = output.targets()
    process = subprocess.Popen(["sh", "-c", command], stdout=stdout, stderr=stderr)
    output.follow(process)
    try:
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert output.finish(5)
    return output


def test_a_full_disk_stops_no_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stdout").symlink_to("/dev/full")
    output = followed("yes | head -c 1000000; echo last words >&2", Shown(hidden=True, folder=tmp_path))
    assert capfd.readouterr().err == (
        f"keras-flow: stdout of rank 0 is written no further: {tmp_path}/stdout: No space left on device\n"
    )
    assert (tmp_path / "stderr").read_text() == "last words\n"
    assert "y\ny\n" in output.kept()


@pytest.mark.parametrize("given", ["file/log", "log"])
def test_a_folder_for_output_that_cannot_be(tmp_path: Path, given: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "log" / "stdout").mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"cannot be written to .*: (Not|Is) a directory. Give --logdir a folder"):
        RankOutput(0, Shown(folder=tmp_path / given))


def test_bytes_of_rank_0_pass_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the launcher's own encoding is, and where a character is cut in two."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    command = r"printf '\377\351 \303'; sleep .1; printf '\251\n'"
    followed(command, Shown(first=True))
    assert stdout.buffer.getvalue() == b"\xff\xe9 \xc3\xa9\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", alone := io.StringIO())
    followed(command, Shown(first=True))
    assert alone.getvalue() == "\ufffd\ufffd é\n"
    assert followed(command, Shown()).kept() == "\ufffd\ufffd é\n"


def test_a_line_without_an_end_is_cut() -> None:
    kept = followed("head -c 3000000 /dev/zero | tr '\\0' .", Shown())._kept
    assert max(map(len, kept)) < 1 << 17
    assert len("".join(kept)) == 3000000
