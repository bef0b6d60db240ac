"""How a launcher tells that ranks hang, and which of them wait for another."""

import os
import sys
import time
from pathlib import Path

import pytest

from keras_flow.backends import engines
from keras_flow.launch import hang
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.output import Shown
from keras_flow.launch.processes import Interrupts, Ranks, cpu_seconds

OURS = Path(engines.__file__).parent


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", True),
        ("/usr/lib/python3/dist-packages/jax/_src/array.py", True),
        (f"{OURS}/torch/boxing.py", True),
        ("/venv/lib/python3.11/site-packages/numpy/lib/npyio.py", False),
        ("/home/me/torch/train.py", False),
        ("/home/me/backends/jax/train.py", False),
    ],
)
def test_frames_of_ranks_that_wait(file: str, waits: bool) -> None:
    """A folder of the user's may be named like an engine, and NumPy waits for no other rank."""
    assert (
        hang._waits(f'Current thread:\n  File "{file}", line 3 in f\n  File "/x/train.py", line 9 in main\n') == waits
    )


BURNS = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\ntime.sleep(60)"


def test_work_of_what_a_rank_has_started_counts(tmp_path: Path) -> None:
    starts = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {BURNS!r}])\ntime.sleep(60)"
    with Ranks(Interrupts(), JobFolder(tmp_path)) as ranks:
        for rank, text in enumerate((starts, "import time\ntime.sleep(60)")):
            ranks.start(rank, [sys.executable, "-S", "-c", text], dict(os.environ), Shown(hidden=True))
        until = time.monotonic() + 30
        while (used := cpu_seconds(ranks.processes))[0] < 0.5 and time.monotonic() < until:
            time.sleep(0.1)
        assert used[0] >= 0.5 and used[1] < 0.4


def test_the_number_of_a_process_that_left_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of days would end with a signal to whoever has it by then."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(pid))
    with Ranks(Interrupts(), JobFolder(tmp_path)) as ranks:
        ranks.start(0, ["true"], dict(os.environ), Shown(hidden=True))
        process = ranks.processes[0]
        while process.poll() is None:
            time.sleep(0.01)
        ranks.forget(process)
        assert (killed, ranks.processes) == ([process.pid], [])
    assert killed == [process.pid]
    assert ranks._guardian is not None and ranks._guardian.returncode == 0
