"""The self-test of versions whose sources have changed, run once for them: two steps of training on two ranks.

It is that of `keras-flow doctor`, in a process of its own on the CPU. What it found is kept in the user's cache folder,
by versions and by what has changed; of several processes of a host that ask at once, one runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from keras_flow import atomic, settings
from keras_flow.backends.engine_process import EngineProcess
from keras_flow.backends.engines import ENGINES
from keras_flow.errors import FlowError

#: seconds for the test on an idle machine, and at most
SECONDS, _MOST = 20.0, 180.0
_PAUSE = 0.1


def require(engine: str, versions: str, places: Mapping[str, str], advice: str) -> None:
    """Run the self-test, unless it was run for this.

    Args:
        engine: the engine.
        versions: the versions that were not tested, in words.
        places: what is wrapped or used, with its fingerprints.
        advice: the end of an error.

    Raises:
        FlowError: it failed, or did not end in time.
    """
    key = hashlib.sha256(json.dumps([engine, versions, sys.version, sorted(places.items())]).encode()).hexdigest()[:16]
    error = _found(_folder() / f"selftest-{engine}-{key}.json", engine)
    if error:
        raise FlowError(
            f"keras_flow was not tested with {versions}, where sources that it wraps have changed, and its self-test "
            f"failed: {error}. {advice}"
        )


def _found(file: Path, engine: str) -> str:
    """Return the error that the self-test found, now or earlier; empty where it passed."""
    running = file.with_suffix(".running")
    end = time.monotonic() + _limit() + 5
    while not file.exists():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            running.touch(exist_ok=False)
        except FileExistsError:
            if time.monotonic() > end:  # whoever began it was ended
                running.unlink(missing_ok=True)
            time.sleep(_PAUSE)
            continue
        except OSError:
            return _run(engine)[0]  # no folder to keep it in
        try:
            error, is_final = _run(engine)
            if not is_final:
                return error
            atomic.write_text(file, json.dumps(error))
        finally:
            running.unlink(missing_ok=True)
    return json.loads(file.read_text())


def _run(engine: str) -> tuple[str, bool]:
    """Run the self-test: its error, and whether it would be the same again."""
    with tempfile.TemporaryDirectory(prefix="keras-flow-selftest-") as folder:
        output = Path(folder, "found.json")
        name, _, value = ENGINES[engine].on_cpu.partition("=")
        environment = {
            **dict.fromkeys(key for key in os.environ if "KERAS_FLOW" in key),
            name: value,
            settings.UNTESTED: "allow",
        }
        limit = _limit()
        told = ("keras_flow.doctor.worker", "test", str(output), "2")
        with EngineProcess(engine, *told, environment=environment) as process:
            if not process.wait(limit):
                return f"it did not end within {limit:.0f} s (`keras-flow doctor` runs it with more time)", False
            if not output.exists():
                return f"it ended with status {process.status}: {process.last_words(500)}", False
        results = json.loads(output.read_text())
    failed = [f"{test}: {result['error']}" for test, result in results.items() if "error" in result]
    return "; ".join(failed), True


def _limit() -> float:
    """Seconds for the test, more where more programs run than there are cores."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return min(_MOST, SECONDS * max(1.0, 2.0 * load / (os.cpu_count() or 1)))


def _folder() -> Path:
    """The user's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "keras_flow"
