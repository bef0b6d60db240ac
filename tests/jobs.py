"""One job for each engine, in which checks of several test files run in turn: importing an engine costs more than most.

    python -m tests.jobs BACKEND FOLDER PART ...

A part is a function without arguments, called on every rank; what it returns on rank 0 is written to FOLDER/PART.json.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: part -> backend -> module whose `main` it is
PARTS = {
    "explain": {backend: f"tests.explain.counting.{backend}" for backend in ("jax", "tensorflow", "torch")},
    "engine": {"tensorflow": "tests.backends.tensorflow.programs", "torch": "tests.backends.torch.checks"},
    "steps": dict.fromkeys(("jax", "tensorflow", "torch"), "tests.steps.worker"),
    "files": dict.fromkeys(("jax", "tensorflow", "torch"), "tests.backends.large_files"),
    "examples": dict.fromkeys(("jax", "tensorflow", "torch"), "tests.small_examples"),
    "tensors": dict.fromkeys(("numpy", "jax", "tensorflow", "torch"), "tests.tensors.worker"),
    # last: its counters stay in the engine
    "boxing": dict.fromkeys(("jax", "tensorflow", "torch"), "tests.conformance.boxing_worker"),
}
#: seconds for a whole job
LIMIT = 500


class Job:
    """The job of a backend, started when the first result is asked for."""

    def __init__(self, backend: str, folder: Path, parts: list[str]):
        self.backend, self.folder, self.parts = backend, folder, parts
        self._error: str | None = None

    def result(self, part: str) -> object:
        """What a part returned.

        Raises:
            AssertionError: the job ended without it; with the end of its output.
        """
        if self._error is None:
            command = [sys.executable, "-m", "tests.jobs", self.backend, str(self.folder), *self.parts]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            self._error = f"{self.backend} job ended with {done.returncode}: {done.stderr[-4000:]}"
        path = self.folder / f"{part}.json"
        assert path.exists(), self._error
        return json.loads(path.read_text())


def run(backend: str, folder: str, parts: list[str]) -> None:
    """Run on every rank."""
    import keras_flow as kf
    from tests import quick

    tempfile.tempdir = folder  # one for all ranks, which outlives them
    quick.set_options(backend)
    kf.init(4)
    seconds = {}
    for part in parts:
        start = time.monotonic()
        made = importlib.import_module(PARTS[part][backend]).main()
        if kf.env.process_index() == 0:
            (Path(folder) / f"{part}.json").write_text(json.dumps(made))
            seconds[part] = round(time.monotonic() - start, 1)
    if kf.env.process_index() == 0:
        print(backend, seconds)


def main(backend: str, folder: str, parts: list[str]) -> None:
    from tests import quick

    quick.set_environment(backend)
    if "explain" in parts:  # the engine writes its programs there, from the start
        dump = Path(folder) / "programs"
        dump.mkdir()
        importlib.import_module(PARTS["explain"][backend]).set_environment(dump)
    import keras_flow as kf

    if backend == "numpy":
        run(backend, folder, parts)
    else:
        kf.run(run, devices=4, args=(backend, folder, parts))


if __name__ == "__main__":
    os.environ.setdefault("KERAS_FLOW_TIMEOUT", "120")
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
