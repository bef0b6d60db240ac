"""Starts the grid's worker once for each backend and hands out its results as they appear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: seconds for all cases of one backend; a case that is not there by then fails
LIMIT = 1800.0


class Grid:
    """One worker process of one backend, started when its first result is asked for."""

    def __init__(self, backend: str, *options: str, limit: float = LIMIT):
        self.backend = backend
        self._limit = limit
        self._folder = Path(tempfile.mkdtemp(prefix=f"grid-{backend}-"))
        self._file = self._folder / "results.jsonl"
        self._log = self._folder / "log.txt"
        self._started = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "tests.parity.worker",
            "--backend",
            backend,
            "--out",
            str(self._file),
            *options,
        ]
        env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=Path(__file__).parents[2]
            )

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
            ended = self._process.poll() is not None  # before reading, so that nothing written last is missed
            for result in self.results():
                if (result["case"], result["layout"]) == (case, layout):
                    return result
            if ended or time.monotonic() - self._started > self._limit:
                raise AssertionError(
                    f"{self.backend}: no result for {case} {layout}; the worker "
                    f"{f'ended with {self._process.returncode}' if ended else 'ran out of time'}:\n"
                    + self._log.read_text()[-4000:]
                )
            time.sleep(0.1)

    def finish(self) -> list[dict]:
        """Wait for the end and return all results."""
        self._process.wait(self._limit)
        return self.results()

    def stop(self) -> None:
        """End the worker."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
