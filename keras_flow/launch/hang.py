"""Detects that a job hangs, and which rank the others wait for."""

from __future__ import annotations

import os
import re
import signal
import time

from keras_flow.backends import engines
from keras_flow.backends.engines import ENGINES
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.processes import RankProcess, cpu_seconds

#: a rank that uses less than this share of one core makes no progress: it sleeps, is stopped, or waits
_IDLE_SHARE = 0.03

#: the engines that wait for other processes, and the folder of keras_flow's part of them (a link, in a checkout)
_WAITING_ENGINES = [engine for engine in ENGINES.values() if engine.trains]
_BACKENDS = re.escape(os.path.dirname(engines.__file__))
#: frames of a rank that waits for other ranks
_WAITING = re.compile(rf"-packages/torch/distributed|{_BACKENDS}/\w+/processes")
#: the innermost frame of a rank that waits inside an engine, where it calls into compiled code
_INSIDE_ENGINE = re.compile(
    "|".join(rf"-packages/{each.module}/|{_BACKENDS}/{each.name}/" for each in _WAITING_ENGINES)
)

#: innermost frames in which to look for these
_INNER_FRAMES = 8

#: seconds after which a rank that is stopped counts as one that hangs: a shell's Ctrl-Z and `fg` take less
_STOPPED_SECONDS = 3.0

#: seconds that a rank may take to write its stack
_ANSWER_SECONDS = 1.0


class HangWatch:
    """Notices that no rank has used the processor for `timeout` seconds."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._looked = self._alive = time.monotonic()
        self._used: dict[int, float] = {}

    def expired(self, running: list[RankProcess]) -> bool:
        """Whether every rank has been idle for the timeout. Cheap enough to be called a few times a second."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < min(1.0, self._timeout / 5):
            return False
        self._looked = now
        used = cpu_seconds(running)
        # a rank whose children have left counts less than before: that is also a sign of life
        if any(abs(used[rank] - self._used.get(rank, 0.0)) > _IDLE_SHARE * passed for rank in used):
            self._alive = now
        self._used = used
        return now - self._alive > self._timeout


class StopWatch:
    """Notices ranks that are stopped by a signal (SIGSTOP, a debugger that was left): the others wait for them."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._since: dict[int, float] = {}

    def stopped(self, running: list[RankProcess]) -> list[int]:
        """Ranks that have been stopped for some seconds. Cheap enough to be called a few times a second."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return []
        self._looked = now
        self._since = {process.rank: self._since.get(process.rank, now) for process in running if process.is_stopped()}
        return sorted(rank for rank, since in self._since.items() if now - since >= _STOPPED_SECONDS)


def find_suspects(running: list[RankProcess], folder: JobFolder) -> tuple[list[int], dict[int, str]]:
    """Ask every rank for its stack, to find the ranks that the others wait for.

    Returns:
        The ranks that the others wait for: those that do not answer, otherwise those that are not inside a collective;
        none where all wait. And the stack of each rank that answered.
    """
    able = [process for process in running if folder.stack(process.rank).exists()]
    # a rank that was asked before wrote its stack of then
    before = {process.rank: folder.stack(process.rank).stat().st_size for process in able}
    for process in able:
        process.send(signal.SIGUSR1)
    until = time.monotonic() + _ANSWER_SECONDS
    stacks: dict[int, str] = {}
    while len(stacks) < len(able) and time.monotonic() < until:
        time.sleep(0.05)
        for process in able:
            written = folder.stack(process.rank).read_bytes()[before[process.rank] :]
            text = written.decode(errors="replace")
            if text.strip():
                stacks[process.rank] = text
    silent = [process.rank for process in able if process.rank not in stacks]
    busy = [rank for rank, stack in stacks.items() if not _waits(stack)]
    return sorted(silent or busy), stacks


def _waits(stack: str) -> bool:
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File")]
    return bool(frames) and (
        _INSIDE_ENGINE.search(frames[0]) is not None or any(_WAITING.search(line) for line in frames[:_INNER_FRAMES])
    )
