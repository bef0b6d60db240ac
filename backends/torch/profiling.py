"""The timeline of a run on PyTorch: a rank is a process, and its profiler names collectives with their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.profiler

from keras_flow.backends.interface import TraceEvent
from keras_flow.backends.torch.devices import world

_ITEM_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1}


@contextmanager
def profiled(folder: Path) -> Iterator[Callable[[], list[TraceEvent]]]:
    """Trace operators and collectives of this rank."""
    profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()), record_shapes=True)
    profiler.start()
    try:
        yield lambda: _events(folder / "trace.json")
    finally:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "trace.json"))


def annotated(name: str) -> AbstractContextManager[object]:
    """A range of torch's profiler."""
    return torch.profiler.record_function(name)


def _events(file: Path) -> list[TraceEvent]:
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    first = min((float(event["ts"]) for event in events), default=0.0)
    rank, found = world().local_ranks[0], []
    for event in events:
        if str(event.get("tid")) == "0" or event.get("cat") == "Trace":
            continue  # the profiler's own
        begin, duration = float(event["ts"]) - first, float(event.get("dur", 0))
        found.append(TraceEvent(rank, f"thread {event['tid']}", event["name"], begin, duration, _facts(event)))
    return found


def _facts(event: dict[str, Any]) -> dict[str, object]:
    args = event.get("args", {})
    facts: dict[str, object] = {}
    if "Collective name" in args:
        facts["collective"] = args["Collective name"]
        size = _ITEM_BYTES.get(str(args.get("dtype")), 0) * int(args.get("Out msg nelems", 0) or 0)
        if size:
            facts["bytes"] = size
    elif args.get("Input Dims"):
        facts["shapes"] = args["Input Dims"]
    return facts
