"""What workers compute for a model: calls of programs, of which one that is overdue is computed by another worker too.

A worker that hangs is not lost: its connection stands, and it keeps its call for as long as it hangs. On TensorFlow it
keeps the chief too, which tells all workers each new function and waits: there `take` fails after the timeout.

errands = Errands(servers, timeout=300, statistics=Statistics())
errands.send(key, program, others)     a worker computes it
errands.take()                         the next result: (key, gradients and the rest, worker)
"""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from keras_flow.errors import FlowError, FlowWarning, LostServerError
from keras_flow.servers.counting import Statistics

#: a call is overdue when it takes so many times the slowest of its program, and so many seconds at least
_TIMES, _LEAST_SECONDS = 10, 5.0


@dataclass
class _Errand:
    """A call on its way, and what computes it again; `since`: when it was sent, in seconds of the monotonic clock."""

    program: Any
    others: Any
    since: float


class Errands:
    """Calls of programs that are on their way to workers.

    A call is overdue after `_TIMES` what the slowest call of its program took, and after half of the timeout where none
    has come back yet: the first one compiles. It is then sent once more. The caller knows the keys, and drops what
    comes second.

    Args:
        servers: the engine's coordinator of workers.
        timeout: seconds without a result after which `take` fails.
        statistics: where repeated calls are counted.
    """

    def __init__(self, servers: Any, timeout: float, statistics: Statistics):
        self._servers, self._timeout, self._statistics = servers, timeout, statistics
        self._results: queue.Queue[tuple[Any, _Errand, float, Any, BaseException | None]] = queue.Queue()
        self._calls: dict[Any, _Errand] = {}
        #: program -> seconds of its slowest call
        self._slowest: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    @property
    def has_results(self) -> bool:
        """Whether `take` has something to return at once."""
        return not self._results.empty()

    def send(self, key: Any, program: Any, others: Any) -> None:
        """Let a worker compute a program."""
        self._calls[key] = call = _Errand(program, others, time.monotonic())
        self._schedule(key, call)

    def forget(self) -> None:
        """A step was given up: what is on its way is of no other, and neither are its errors."""
        self._calls.clear()

    def take(self) -> tuple[Any, Any, int]:
        """Wait for the next result: its key, what was computed, by which worker; of a repeated call also the second.

        Raises:
            FlowError: none came within the timeout, or the servers are gone.
        """
        until = time.monotonic() + self._timeout
        while True:
            due = min([until, *(self._due(call) for call in self._calls.values())])
            try:
                key, call, seconds, found, error = self._results.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                if time.monotonic() >= until:
                    raise FlowError(
                        f"no worker has finished a batch for {self._timeout:g} s: they hang, or are all gone"
                    ) from None
                self._repeat()
                continue
            if error is None:
                self._calls.pop(key, None)
                self._slowest[call.program] = max(seconds, self._slowest.get(call.program, 0.0))
                return key, *found
            if self._calls.get(key) is call:
                if self._servers.is_lost(error):
                    raise LostServerError from error
                self._servers.settle()
                raise error

    def _due(self, call: _Errand) -> float:
        if not self._servers.can_repeat:
            return math.inf
        slowest = self._slowest.get(call.program)
        half = self._timeout / 2
        return call.since + (half if slowest is None else min(half, max(_LEAST_SECONDS, _TIMES * slowest)))

    def _repeat(self) -> None:
        """Send what is overdue once more, which a worker that does not hang takes."""
        now = time.monotonic()
        for key, call in self._calls.items():
            if self._due(call) <= now:
                warnings.warn(
                    f"a worker has not finished a batch for {now - call.since:.0f} s: another one computes it too",
                    FlowWarning,
                    stacklevel=2,
                )
                self._statistics.repeated += 1
                call.since = now
                self._schedule(key, call)

    def _schedule(self, key: Any, call: _Errand) -> None:
        waits = self._servers.schedule(call.program, call.others)
        threading.Thread(target=self._wait, args=(key, call, waits), daemon=True).start()

    def _wait(self, key: Any, call: _Errand, waits: Callable[[], tuple[Any, int]]) -> None:
        begun = time.monotonic()
        found, error = None, None
        try:
            found = waits()
        except BaseException as raised:  # the step that waits for it raises it
            error = raised
        self._results.put((key, call, time.monotonic() - begun, found, error))
