"""The timeline of a run on JAX: its profiler's events say which device they ran on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax

from keras_flow.backends.interface import TraceEvent


@contextmanager
def profiled(folder: Path) -> Iterator[Callable[[], list[TraceEvent]]]:
    """Trace into a folder; only what the compiled programs do, and annotations."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would be an event
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield lambda: _events(folder)
    finally:
        jax.profiler.stop_trace()


def annotated(name: str) -> AbstractContextManager[object]:
    """A range of JAX's profiler."""
    return jax.profiler.TraceAnnotation(name)


def _events(folder: Path) -> list[TraceEvent]:
    found = []
    for file in folder.rglob("*.trace.json.gz"):
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        threads = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
        for event in events:
            if event.get("ph") != "X" or event["name"].startswith("end: "):
                continue
            facts = {name: value for name, value in event.get("args", {}).items() if not name.startswith("_")}
            rank = facts.pop("device_ordinal", None)
            lane = str(threads.get(event["tid"], event["tid"])).partition("/")[0] if rank is None else "operations"
            begin, duration = float(event["ts"]), float(event.get("dur", 0))
            found.append(TraceEvent(None if rank is None else int(rank), lane, event["name"], begin, duration, facts))
    return found
