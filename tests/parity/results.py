"""The grid's workers, one process for each backend, and their results as they appear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

#: seconds for all cases of one backend; a case that is not there by then fails
LIMIT = 1800.0


class Grid:
    """The worker process of one backend.

    Args:
        backend: name of the backend.
        options: further arguments of `tests.parity.worker`.
        limit: seconds after its start until a result that is not there counts as missing.
    """

    def __init__(self, backend: str, *options: str, limit: float = LIMIT):
        self.backend = backend
        self._limit = limit
        self.name = f"{backend} {' '.join(options)}".strip()
        folder = Path(tempfile.mkdtemp(prefix=f"grid-{backend}-"))
        self._file, self._log = folder / "results.jsonl", folder / "log.txt"
        self._command = ["-m", "tests.parity.worker", "--backend", backend, "--out", str(self._file), *options]
        self._process: subprocess.Popen | None = None
        self._started = 0.0

    def start(self, nice: int = 0) -> Grid:
        """Start the worker.

        Args:
            nice: how much it steps back behind other processes; the ranks that it starts inherit that.
        """
        env = {**os.environ, "KERAS_BACKEND": self.backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._started = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=Path(__file__).parents[2],
            )
        if nice:
            psutil.Process(self._process.pid).nice(nice)
        return self

    @property
    def running(self) -> bool:
        """Whether the worker was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> bool:
        """Whether the worker has ended, or its time is over."""
        return self._process is not None and (self._process.poll() is not None or self._is_late())

    def progress(self) -> str:
        """How far the worker is."""
        found = self.results()
        last = f"{found[-1]['case']} {found[-1]['layout']}" if found else "starting"
        return f"{self.name}: {len(found)} results in {time.monotonic() - self._started:.0f} s, last {last}"

    def results(self) -> list[dict]:
        """The results so far."""
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def result(self, case: str, layout: str) -> dict:
        """Wait for one result.

        Raises:
            AssertionError: the worker ended without it, or the time is over; with the end of its log.
        """
        while True:
            ended = self.ended  # before reading, so that nothing written last is missed
            for result in self.results():
                if (result["case"], result["layout"]) == (case, layout):
                    return result
            if ended:
                raise AssertionError(f"{self.backend}: no result for {case} {layout}; {self.end()}")
            time.sleep(0.1)

    def finish(self) -> list[dict]:
        """Wait for the end and return all results.

        Raises:
            AssertionError: the worker failed, or the time is over; with the end of its log.
        """
        while not self.ended:
            time.sleep(0.1)
        assert not self.failed, f"{self.backend}: {self.end()}"
        return self.results()

    @property
    def failed(self) -> bool:
        """Whether the worker ended with an error, or its time is over."""
        return self._process is not None and (self._is_late() or self._process.poll() not in (None, 0))

    def end(self) -> str:
        """How the worker ended, and the end of its log."""
        code = self._process.poll() if self._process else None
        how = "ran out of time" if code is None else f"ended with {code}"
        return f"the worker {how}:\n{self._log.read_text()[-4000:]}"

    def stop(self) -> None:
        """End the worker."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _is_late(self) -> bool:
        return self.running and time.monotonic() - self._started > self._limit


class Schedule:
    """Workers that run in turn: one at a time beside the other tests of a session, two when only the grid is left.

    Two cores are then busy from the first second to the last. The workers step back behind the tests, of which some
    watch the clock.

    Args:
        grids: the workers, in the order in which they start.
        at_once: how many run at once.
    """

    def __init__(self, grids: Sequence[Grid], at_once: int = 1):
        self.grids = grids
        self._at_once = at_once
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._start_in_turn, daemon=True)
        self._thread.start()

    def _start_in_turn(self) -> None:
        for grid in self.grids:
            while sum(other.running for other in self.grids) >= self._at_once:
                if self._stopped.wait(0.2):
                    return
            if self._stopped.is_set():
                return
            grid.start(nice=10)

    def only_the_grid_is_left(self) -> None:
        """Let two workers run at once."""
        self._at_once = 2

    def stop(self) -> None:
        """End all workers; none starts any more."""
        self._stopped.set()
        self._thread.join()
        for grid in self.grids:
            grid.stop()
