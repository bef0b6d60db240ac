"""Runs one command as n ranks on this host and ends all of them when one fails, naming it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from keras_flow.backends.active import DEVICES_VARIABLE
from keras_flow.errors import LaunchError
from keras_flow.launch import failure, hang
from keras_flow.launch.folder import FOLDER_VARIABLE, JobFolder
from keras_flow.launch.processes import Interrupts, RankProcess, Ranks

#: seconds that a rank may wait for another, unless the user says otherwise; the engines' own default
DEFAULT_TIMEOUT = 1800.0

#: set by the user or by the launcher: that time, in seconds; the collectives of the ranks use it too
TIMEOUT_VARIABLE = "KERAS_FLOW_TIMEOUT"

#: seconds between two looks at the ranks
_LOOK_SECONDS = 0.03

#: seconds that a rank which has written its exception may take to leave
_LEAVING_SECONDS = 2.0

#: seconds in which the rank that caused another's "connection closed" shows up as failed itself
_CAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One command, run as several ranks.

    Attributes:
        ranks: number of ranks, each a process of this host.
        command: the command and its arguments, the same for every rank.
        timeout: seconds without progress after which the job ends.
        show_all: show the output of every rank, each line behind `[rank k] `; else that of rank 0 only.
        env: environment variables for every rank, beyond those of the launcher.
    """

    ranks: int
    command: Sequence[str]
    timeout: float
    show_all: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def stated_timeout(timeout: float | None) -> float:
    """The timeout of a job in seconds: as given, else KERAS_FLOW_TIMEOUT, else half an hour."""
    text = timeout if timeout is not None else os.environ.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"the timeout of a job was given as {text!r}; legal is a number of seconds above 0.")
    return seconds


@contextmanager
def job_folder() -> Iterator[JobFolder]:
    """A private folder for a job, removed afterwards."""
    path = tempfile.mkdtemp(prefix="keras-flow-")
    try:
        yield JobFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def launch(job: Job, folder: JobFolder) -> None:
    """Run the ranks of `job` until all have left with exit code 0.

    Raises:
        LaunchError: a rank failed, left while others needed it, or the job made no progress. No rank runs any more.
        KeyboardInterrupt: the same, after Ctrl-C.
    """
    if os.name != "posix":
        raise LaunchError("keras_flow starts several processes only on POSIX systems (Linux, macOS, WSL).")
    with Interrupts() as interrupts, Ranks(interrupts) as ranks:
        port = str(_free_port())
        for rank in range(job.ranks):
            interrupts.check()
            ranks.start(rank, job.command, _environment(job, folder, rank, port), job.show_all)
        _watch(job, folder, ranks, interrupts)


def _watch(job: Job, folder: JobFolder, ranks: Ranks, interrupts: Interrupts) -> None:
    watch = hang.HangWatch(job.timeout)
    while running := ranks.running():
        interrupts.check()
        if first := _first_failure(folder, ranks.processes):
            raise _explain(job, folder, ranks, first)
        if watch.expired(running):
            suspects, stacks = hang.find_suspects(running, folder)
            raise failure.rank_hangs(suspects, job.ranks, job.timeout, stacks)
        time.sleep(_LOOK_SECONDS)
    if first := _first_failure(folder, ranks.processes):
        raise _explain(job, folder, ranks, first)
    for process in ranks.processes:
        process.output.finish()


def _first_failure(folder: JobFolder, processes: Sequence[RankProcess]) -> RankProcess | None:
    """The rank that failed first, by its exit code or by the exception it wrote down; None where none has."""
    failed: list[tuple[bool, float, RankProcess]] = []
    for process in processes:
        written = failure.read(folder, process.rank)
        if written is not None:
            failed.append((written.lost_neighbour or written.waited_too_long, written.time, process))
        elif process.code:
            # killed, or no Python error: its neighbours can only have failed because of it
            failed.append((False, 0.0, process))
    return min(failed, key=lambda each: each[:2])[2] if failed else None


def _explain(job: Job, folder: JobFolder, ranks: Ranks, first: RankProcess) -> LaunchError:
    """The error for a failed job, once its cause is known."""
    written = failure.read(folder, first.rank)
    if written is not None and written.lost_neighbour:
        # the neighbour that was lost may have left a moment earlier and not been seen yet
        _wait(_CAUSE_SECONDS, lambda: _first_failure(folder, ranks.processes) not in (None, first))
        ranks.running()
        first = _first_failure(folder, ranks.processes) or first
        written = failure.read(folder, first.rank)
    if written is not None and (written.lost_neighbour or written.waited_too_long):
        if early := [process for process in ranks.processes if process.code == 0]:
            return failure.rank_left_early(early[0].rank, job.ranks, first.rank, written)
        if written.waited_too_long:
            others = [process for process in ranks.running() if process is not first]
            suspects, stacks = hang.find_suspects(others, folder)
            if suspects:
                return failure.rank_hangs(suspects, job.ranks, job.timeout, stacks)
    _wait(_LEAVING_SECONDS, lambda: first.poll() is not None)
    code = first.code or (written.exit_code if written else 1)
    if code == -signal.SIGTERM and written is not None:
        code = written.exit_code
    first.output.finish(0.5)
    return failure.rank_failed(first.rank, job.ranks, code, written, first.output.kept())


def _wait(seconds: float, until: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _environment(job: Job, folder: JobFolder, rank: int, port: str) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // job.ranks)
    return {
        "OMP_NUM_THREADS": str(threads),  # the ranks share the cores; the user's own value wins
        "PYTHONHASHSEED": "0",  # the same order of sets in every rank; the user's own value wins
        **os.environ,
        **job.env,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        DEVICES_VARIABLE: str(job.ranks),
        TIMEOUT_VARIABLE: str(job.timeout),
        FOLDER_VARIABLE: str(folder.path),
    }


#: below the ports that systems hand out by themselves (Linux: from 32768), which another program may get meanwhile
_PORTS = range(20000, 32000)


def _free_port() -> int:
    """A port that nobody listens on now; rank 0 does some seconds later, and other jobs on this host choose too."""
    chooser = random.SystemRandom()
    while True:
        port = chooser.choice(_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
