"""Runs small programs as jobs, in processes of their own, and finds what they left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("KERAS_FLOW_")},
    "KERAS_BACKEND": "torch",
    "PYTHONFAULTHANDLER": "1",  # `finish` asks what does not end for its stacks
}


def start(command: list[str], backend: str = "torch", **variables: str) -> subprocess.Popen[str]:
    """Start `python COMMAND...` with its output kept."""
    return subprocess.Popen(
        [sys.executable, *command],
        env={**ENVIRONMENT, "KERAS_BACKEND": backend, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str, str]:
    """Exit code, stdout and stderr.

    Raises:
        AssertionError: it did not end within `seconds`; with its output and the stacks of all its processes.
    """
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for child in tree(process.pid):  # its parent hands on what it writes, and ends then
            with contextlib.suppress(psutil.NoSuchProcess):
                if not child.children():
                    child.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.send_signal(signal.SIGABRT)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired as still:
            process.kill()
            out, err = still.stdout or b"", still.stderr or b""
        raise AssertionError(f"no end within {seconds} s\nstdout:\n{out}\nstderr:\n{err}") from None
    return process.returncode, out, err


def launch(script: Path, *options: str, ranks: int = 3, backend: str = "torch") -> tuple[int, str, str]:
    """`keras-flow launch --devices RANKS OPTIONS SCRIPT`."""
    command = ["-m", "keras_flow.cli.app", "launch", "--devices", str(ranks), *options, str(script)]
    return finish(start(command, backend))


def write(folder: Path, text: str, name: str = "program.py") -> Path:
    """A script in `folder`."""
    path = folder / name
    path.write_text(text)
    return path


def tree(pid: int) -> list[psutil.Process]:
    """All processes below `pid`."""
    return psutil.Process(pid).children(recursive=True)


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for `true`, and fail if it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def interrupt_and_check(process: subprocess.Popen[str], number: signal.Signals, seconds: float = 10) -> int:
    """Send a signal to a launching process; its exit code, once nothing below it runs any more."""
    below = tree(process.pid)
    assert len(below) >= 3, "two ranks and the guardian"
    process.send_signal(number)
    code = process.wait(seconds)
    _, alive = psutil.wait_procs(below, timeout=seconds)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE], "left running"
    return code


class Writes:
    """What a stranger would like to be unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)
