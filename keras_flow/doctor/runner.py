"""Checks the host, and each backend in processes with a time limit, and builds the report."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keras_flow.backends.engine_process import EngineProcess
from keras_flow.backends.engines import ENGINES, require_known, that_train
from keras_flow.doctor import host, links
from keras_flow.doctor.report import Check, EngineReport, Report
from keras_flow.runtime import versions

#: packages that Keras (wrappers, plots, Orbax) and TensorFlow (Lite) import where they are installed, beside what is
#: checked: a third of the time of their own imports
_EXTRAS = frozenset(["sklearn", "matplotlib", "jax"])

#: ranks of the self-test, and of the measured links
_RANKS = 2
_LINKS = (2, 4)


def examine(
    engines: Sequence[str] = tuple(ENGINES),
    *,
    bandwidth: bool = False,
    seconds: float = 120,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check the host and each backend.

    Args:
        engines: backends to check.
        bandwidth: measure links too.
        seconds: time limit of each process.
        tell: called with a line about what is being done.

    Raises:
        FlowError: an unknown backend.
    """
    require_known(engines, that_train())
    names = list(dict.fromkeys(engines))
    tell(f"checking {', '.join(names)}")
    # most of the time is an engine's import, on one core; a link is measured with nothing beside it
    stop = threading.Event()
    with ThreadPoolExecutor(1 if bandwidth else len(names)) as pool:
        try:
            reports = list(pool.map(lambda name: _engine(name, bandwidth, seconds, stop), names))
        except BaseException:  # Ctrl-C: the pool waits for its threads, so these end their processes
            stop.set()
            raise
    return Report(
        host.found_versions(), host.describe(), host.environment(), host.SET_BY_LAUNCHER, host.checks(), reports
    )


def _engine(name: str, bandwidth: bool, seconds: float, stop: threading.Event) -> EngineReport:
    """Check one backend: import, collective, training, and links where they are to be measured."""
    version = versions.installed(name)
    if version is None:
        return EngineReport(
            name, None, checks=[Check("import", "absent", f"not installed; pip install '{ENGINES[name].extra}'")]
        )
    # a process of its own: an engine that crashes at import must not take the report with it
    seen = _process(name, "look", (), seconds, stop)
    if "error" in seen:
        return EngineReport(name, version, checks=[Check("import", "failed", str(seen["error"]))])
    checks = [Check("import", "ok")]
    has_two_ranks = seen["type"] == "cpu" or len(seen["devices"]) >= _RANKS
    most = len(seen["devices"]) if seen["type"] != "cpu" else max(_LINKS)
    rings = []
    if not has_two_ranks:
        checks.append(Check("collective", "skipped", f"one device of type {seen['type']!r}: there is no other rank"))
    else:
        counts = [count for count in _LINKS if count <= most] if bandwidth else []
        results = _process(name, "test", (round(seconds), _RANKS, *counts), seconds, stop)
        checks += _checks_of(results)
        measured = results.get("bandwidth", {}).get("ok", {})
        rings = [links.fit(int(count), {int(k): v for k, v in times.items()}) for count, times in measured.items()]
    return EngineReport(name, version, seen["devices"], seen["capabilities"], seen["environment"], checks, rings)


def _checks_of(results: dict) -> list[Check]:
    """The results of the self-tests as checks."""
    if "error" in results:
        return [Check("self-test", "failed", str(results["error"]))]
    checks = []
    for name, result in results.items():
        if "error" in result:
            checks.append(Check(name, "failed", result["error"]))
        elif name == "collective":
            checks.append(Check(name, "ok", f"all-reduce over {_RANKS} ranks, {1e3 * result['ok']:.2g} ms"))
        elif name == "training":
            checks.append(Check(name, "ok", "two steps, loss {:.6f}; one device {:.6f}".format(*result["ok"])))
    return checks


def _process(engine: str, action: str, numbers: Sequence[int], seconds: float, stop: threading.Event) -> dict:
    """Run `worker` in a process; returns its result, or under "error" its error or how it ended."""
    with tempfile.TemporaryDirectory(prefix="keras-flow-doctor-") as folder:
        output = Path(folder) / "found.json"
        paths = [_without_extras(engine, Path(folder)), os.environ.get("PYTHONPATH", "")]
        # an empty entry would be the folder of the caller
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        told = ("keras_flow.doctor.worker", action, str(output), *map(str, numbers))
        with EngineProcess(engine, *told, environment=environment) as process:
            if not process.wait(seconds, lambda: _raise_if(stop)):
                last = process.last_words(500) or "none"
                return {"error": f"no result after {seconds:g} s (--timeout); its last output: {last}"}
            if output.exists():
                return json.loads(output.read_text())
            last = process.last_words(1000)
            return {"error": f"the process ended with exit code {process.status} and no result: {last}"}


def _raise_if(stop: threading.Event) -> None:
    if stop.is_set():
        raise KeyboardInterrupt


def _without_extras(engine: str, folder: Path) -> str:
    """A folder in which Python finds that packages which Keras and engines import where they can are not there."""
    for name in _EXTRAS - {engine}:
        (folder / "path" / name).mkdir(parents=True)
        (folder / "path" / name / "__init__.py").write_text(f"raise ImportError('{name}: of no use to doctor')\n")
    return str(folder / "path")
