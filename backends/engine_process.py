"""A Python process with an engine of its own: an engine is chosen by environment before Keras is imported."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

from keras_flow import settings
from keras_flow.current.processes import OF_JOB

#: seconds between two looks at the process, and in which it may end by itself
_LOOK_SECONDS, _END_SECONDS = 0.1, 10.0


class EngineProcess:
    """Runs a module with an engine, as `python -m` does, and keeps what it writes. Leaving its `with` block ends it.

    Args:
        engine: Keras's name of it.
        module: a module of keras_flow, and its arguments.
        environment: variables beside those of this process; None takes one away. What says that this process is a rank
            of a job is not handed on.
        with_errors: keep what it writes to standard error too; otherwise that is thrown away.
    """

    def __init__(
        self,
        engine: str,
        *module: str,
        environment: Mapping[str, str | None] | None = None,
        with_errors: bool = True,
    ) -> None:
        ours = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **dict.fromkeys((*OF_JOB, settings.DEVICES))}
        variables = {**ours, "KERAS_BACKEND": engine, **(environment or {})}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", *module],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # its ranks end when it is gone
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float = math.inf, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Whether it ends within these seconds; `meanwhile` is called many times a second, and may raise."""
        until = time.monotonic() + seconds
        while self.status is None:
            if time.monotonic() >= until:
                return False
            meanwhile()
            time.sleep(_LOOK_SECONDS)
        return True

    def output(self) -> bytes:
        """All that the process has written so far."""
        # where it stands is also where the process writes on
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0)

    def last_words(self, most: int) -> str:
        """The end of what it has written, at most so many characters."""
        return self.output().decode(errors="replace").strip()[-most:]
