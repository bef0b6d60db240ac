"""Functions of `__main__` that travel to other processes keep their file, so that tracebacks show its lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SENDS = """
import sys
from keras_flow.launch import by_value

def outer():
    class Inner:
        def call(self):
            raise ValueError("boom")  # the line
    return Inner().call()

open(sys.argv[1], "wb").write(by_value.dumps(outer))
"""
RECEIVES = """
import sys, traceback
from keras_flow.launch import by_value
try: by_value.loads(open(sys.argv[1], "rb").read())()
except ValueError: traceback.print_exc()
"""


def python(*command: str) -> str:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60).stderr


def test_a_traceback_elsewhere_shows_file_and_line(tmp_path: Path) -> None:
    script, sent = tmp_path / "program.py", tmp_path / "sent"
    script.write_text(SENDS)
    assert python(str(script), str(sent)) == ""
    err = python("-c", RECEIVES, str(sent))
    assert f'File "{script}", line 8, in call\n    raise ValueError("boom")  # the line' in err
    assert "dynamic-code" not in err


def test_lines_that_are_in_no_file_travel_too(tmp_path: Path) -> None:
    """Cells of a notebook are in `linecache` alone."""
    sent = tmp_path / "sent"
    cell = (
        f"import linecache, sys\ntext = {SENDS!r}\nname = '<ipython-input-8>'\n"
        "linecache.cache[name] = (len(text), None, text.splitlines(True), name)\n"
        "exec(compile(text, name, 'exec'))"
    )
    assert python("-c", cell, str(sent)) == ""
    err = python("-c", RECEIVES, str(sent))
    assert 'File "<ipython-input-8>", line 8, in call\n    raise ValueError("boom")  # the line' in err
