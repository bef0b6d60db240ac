"""How a rank failed: the rank writes it down, the launcher reads it and raises an error that names the rank."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from keras_flow.backends.engines import ENGINES
from keras_flow.current.joining import WRITER_FAILED, SilentProcess
from keras_flow.errors import FlowError, LaunchError, frames_of_user
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.job import Job

#: lines of a traceback or of a rank's output that an error repeats
TAIL_LINES = 30

#: texts of errors of a rank that lost or waited for another one, and so is not the cause itself
_LOST_NEIGHBOUR = re.compile(
    "|".join(
        (
            *(r"[Cc]onnection (?:closed|reset|refused)", "Broken pipe", "Socket closed"),
            re.escape(WRITER_FAILED),
            *(re.escape(words) for engine in ENGINES.values() for words in engine.lost_neighbour),
        )
    )
)
#: what a terminal does not show: styles, movements of the cursor, blanks
_INVISIBLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\s\b]")
_WAITING_MODULES = {"keras_flow", "keras", "jaxlib", *(each.module for each in ENGINES.values() if each.trains)}
_WAITED_TOO_LONG = re.compile(r"[Tt]imed out|wait timeout|TimeoutError|^SilentProcess")


class RankError(LaunchError):
    """A rank of a job failed, left early or hung; the other ranks were ended.

    Attributes:
        rank: the rank that failed.
        exit_code: exit code of its process, negative for a signal; None where it was ended because it hung.
        details: the end of its traceback or output.
        endings: how each process of this host ended, in words; process -> text. Set by the launcher.
    """

    endings: Mapping[int, str] = MappingProxyType({})

    def __init__(self, message: str, rank: int, exit_code: int | None = None, details: str = ""):
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.details = details

    @property
    def exit_status(self) -> int:
        """The exit status for a command that ran the job: that of the rank, 128 + n after signal n, otherwise 1."""
        return 1 if not self.exit_code else self.exit_code if self.exit_code > 0 else 128 - self.exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank, self.exit_code, self.details)


class Interruption(RankError):
    """The job was asked to end, by a signal at another host's launcher.

    Attributes:
        number: the number of the signal.
        host: the name of that host.
    """

    def __init__(self, number: int, host: str, rank: int, text: str = ""):
        super().__init__(text or f"interrupted at host {host}", rank, -number)
        self.number = number
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.number, self.host, self.rank, str(self))


@dataclass(frozen=True)
class Failure:
    """The exception that ended a rank.

    Attributes:
        time: seconds since the epoch, for the order of failures.
        summary: type and text of the exception, one line where it has one.
        trace: the traceback as Python prints it.
        exit_code: the code with which the rank is about to leave.
        left: whether it called `sys.exit`: a status for the caller, without a traceback.
        silent: the process that did not answer this one in time. 0 where none is known: process 0 asks all others,
            which wait for process 0 alone.
        waits: whether it may come of waiting for another process: an engine or keras_flow raised it.
    """

    time: float
    summary: str
    trace: str
    exit_code: int = 1
    left: bool = False
    silent: int = 0
    waits: bool = True

    @property
    def lost_neighbour(self) -> bool:
        """Whether the exception is that of a rank that lost the connection to another one."""
        return self.waits and bool(_LOST_NEIGHBOUR.search(self.summary))

    @property
    def waited_too_long(self) -> bool:
        """Whether the exception is that of a rank that waited too long for another one."""
        return self.waits and bool(_WAITED_TOO_LONG.search(self.summary))


def record(folder: JobFolder, rank: int, error: BaseException, exit_code: int = 1) -> None:
    """Write down the exception that ends this rank, before it leaves."""
    failure = Failure(
        time=time.time(),
        summary=_summary(error),
        trace=_trace(error),
        exit_code=exit_code,
        left=isinstance(error, SystemExit),
        silent=error.process if isinstance(error, SilentProcess) else 0,
        waits=_may_wait(error),
    )
    target = folder.failure(rank)
    written = target.with_suffix(".new")
    written.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    os.replace(written, target)  # the launcher never sees half a file


def _may_wait(error: BaseException) -> bool:
    """Whether an engine or keras_flow raised an error, and not a program that a server of its own kept waiting."""
    text = str(error)
    # what a worker that reads data raised, or a function that a pipeline called, is raised again by the engine
    if "Traceback (most recent call last)" in text or "DataLoader" in text:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    within = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    raised = [type(error).__module__.partition(".")[0]]
    raised += [name for name in within if name not in sys.stdlib_module_names][-1:]
    # gloo raises a plain error where the program itself waits for an operation
    return "gloo" in text.lower() or not _WAITING_MODULES.isdisjoint(raised)


def _summary(error: BaseException) -> str:
    """Type and text of an exception."""
    if isinstance(error, FlowError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception_only(error)).strip()


def _trace(error: BaseException) -> str:
    """The traceback of an exception without its last lines, which are the summary.

    Of an error of keras_flow only the lines of the user's program: its text says the rest.
    """
    if isinstance(error, FlowError):
        return "".join(traceback.format_list(frames_of_user(error)))
    said = "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(error)).removesuffix(said)


def read(folder: JobFolder, rank: int) -> Failure | None:
    """The exception that ended `rank`; None where it wrote none (killed, or not a Python error)."""
    path: Path = folder.failure(rank)
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def tail(text: str, lines: int = TAIL_LINES) -> str:
    """The last lines of `text`."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def left_how(code: int) -> str:
    """Say in words how a process left.

    Example:
        >>> left_how(-9)
        'killed by SIGKILL'
    """
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def rank_failed(rank: int, job: Job, code: int, failure: Failure | None, output: str, entered: str) -> RankError:
    """The error for a rank that raised, left with a code other than 0, or was killed.

    Args:
        rank: the rank.
        job: its job.
        code: its exit code.
        failure: what it wrote down.
        output: the last lines of its output.
        entered: what it last entered that waits for others, as far as it told.
    """
    how, who = left_how(code), _who(rank, job)
    # a program that chose its status needs no traceback
    if failure is not None and failure.left:
        message = failure.summary.removeprefix("SystemExit: ")
        head = f"{who} left with {how}" + ("" if message == str(code) else f": {message}")
        return RankError(_text(head, rank, job, "", ""), rank, code)
    if failure is None:
        head, what, details = f"{who} failed: {how}", "its output", output
    else:
        # an exit code behind a text of several lines would be taken for a part of it
        head = f"{who} failed: {failure.summary}" + ("" if "\n" in failure.summary else f" ({how})")
        what, details = "where it was", failure.trace
    # an exception says itself where it came from, unless it came from waiting
    if entered and (failure is None or failure.lost_neighbour or failure.waited_too_long):
        head += f"\nThe last call it entered that waits for other ranks: {entered}."
    return RankError(_text(head, rank, job, what, details), rank, code, tail(details))


def rank_left_early(rank: int, failed: int, job: Job, failure: Failure | None) -> RankError:
    """The error for a rank that left with code 0 while another still needed it, and failed or was ended for that."""
    what = "was ended by its engine" if failure is None else f"failed with {failure.summary}"
    trace = "" if failure is None else failure.trace
    head = (
        f"{_who(rank, job)} left early with exit code 0 while other {job.words} still needed it: {job.word} {failed} "
        f"{what}\nEvery {job.word} must take part in the same steps: look for a sys.exit or a "
        f"return that only some {job.words} reach, and for a loop that makes fewer steps on some"
    )
    return RankError(_text(head, failed, job, "where it was", trace), rank, 0, tail(trace))


def rank_hangs(suspects: list[int], job: Job, stacks: dict[int, str]) -> RankError:
    """The error for a job that made no progress; `suspects` are the ranks the others wait for, as far as known."""
    names = ", ".join(str(rank) for rank in suspects)
    several = len(suspects) > 1
    rank = suspects[0]
    details = stacks.get(rank) or "(it does not answer: stopped, or stuck outside Python)"
    head = f"{job.words if several else job.word} {names} of {job.count} {'hang' if several else 'hangs'}"
    if stacks:
        head += f": no progress for {job.timeout:g} s, the timeout of this job. If the work is honest, give a longer "
        head += "one: `keras-flow launch --timeout SECONDS`, kf.run(..., timeout=SECONDS) or KERAS_FLOW_TIMEOUT"
    return RankError(_text(head, rank, job, "where it is", details), rank, None, details)


def _who(rank: int, job: Job) -> str:
    node = rank // job.processes
    name = f", {socket.gethostname()}" if node == job.node else ""  # others' names are known to their launchers
    where = f" (host {node}{name})" if job.nodes > 1 else ""
    return f"{job.word} {rank} of {job.count}{where}"


def _text(head: str, rank: int, job: Job, what: str, details: str) -> str:
    """The text of an error: what happened, then the last lines of details about a rank."""
    ended = f"The other {job.words} were ended."
    if not _INVISIBLE.sub("", details):
        return f"{head}\n{ended}"
    return f"{head}\n{ended} {job.word.capitalize()} {rank}, {what}:\n{tail(details)}"
