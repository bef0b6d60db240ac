"""The timeline of a run on PyTorch: a rank is a process, and its profiler names collectives with their bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.profiler

from keras_flow.backends.engine_records import TraceEvent
from keras_flow.backends.torch.devices import world

#: names of collectives: of the calls (`c10d::allreduce_`), and of what runs (`gloo:all_reduce`, NCCL's kernels)
_COLLECTIVES = {
    "all_reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce_scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all_to_all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast", re.IGNORECASE),
    "send": re.compile(r"send|recv", re.IGNORECASE),
}
#: name of the range around messages that are an all-reduce together; its bytes follow
_SMALL_ALL_REDUCE = "all_reduce by doubling"
_CALL, _RUN = re.compile(r"^c10d::"), re.compile(r"^gloo:|^nccl(Dev)?Kernel")
#: dtypes as NCCL's events name them -> as others do
_NCCL_DTYPES = {
    "Double": "double",
    "Long": "long int",
    "Float": "float",
    "Int": "int",
    "Half": "c10::Half",
    "BFloat16": "c10::BFloat16",
    "Short": "short int",
    "Char": "signed char",
    "Byte": "unsigned char",
    "Bool": "bool",
}
#: as the profiler names dtypes
_ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}


@contextmanager
def profiled(folder: Path) -> Iterator[Callable[[], tuple[int, list[TraceEvent]]]]:
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


def gradients_of(variables: Iterable[str]) -> AbstractContextManager[object]:
    """A range around a message of the gradients of several variables, while there is a profile; by their paths."""
    if not torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return nullcontext()
    layers = dict.fromkeys(path.rpartition("/")[0] for path in variables)
    return annotated("gradients of " + ", ".join(layers))


def small_all_reduce(value: torch.Tensor) -> AbstractContextManager[object]:
    """A range around the messages of an all-reduce of `doubling`, while there is a profile: one collective."""
    if not torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return nullcontext()
    return annotated(f"{_SMALL_ALL_REDUCE} of {value.nbytes} bytes")


def _events(file: Path) -> tuple[int, list[TraceEvent]]:
    """The events of a trace in Chrome's format: collectives as they ran, with bytes, and with the place of their call.

    A call and its run are two events of two threads; neither names the other. A run is that of the first call of its
    kind and shape that has none yet. Messages of a small all-reduce are in its range, which stands for them.
    """
    profile = json.loads(file.read_text())
    events = [event for event in profile["traceEvents"] if event.get("ph") == "X"]
    rank, found = world().local_ranks[0], []
    events = [event for event in events if str(event.get("tid")) != "0" and event.get("cat") != "Trace"]  # its own
    events.sort(key=lambda event: float(event["ts"]))
    first = float(events[0]["ts"]) if events else 0.0
    place = _Places(events)
    calls = [event for event in events if _CALL.match(event["name"]) and _kind(event) is not None]
    ranges = [event for event in events if event["name"].startswith(_SMALL_ALL_REDUCE)]
    for event in events:
        facts: dict[str, object] = {"shapes": dims} if (dims := event.get("args", {}).get("Input Dims")) else {}
        kind = origin = None
        if event["name"].startswith(_SMALL_ALL_REDUCE):
            kind, origin = "all_reduce", place.of_cause(event)
            facts["bytes"] = int(event["name"].split()[-2])
        elif _RUN.match(event["name"]) and (kind := _kind(event)) is not None:
            call = next((call for call in calls if _may_be(call, event)), None)
            if call is not None:
                calls.remove(call)
                origin = place.of_cause(call)
                if any(_is_inside(call, whole) for whole in ranges):
                    kind = origin = None
            if kind is not None and (size := _bytes(event, call)):
                facts["bytes"] = size
        begin, duration = float(event["ts"]) - first, float(event.get("dur", 0))
        if origin is not None:
            origin = (origin[0], origin[1] - first)
        found.append(TraceEvent(rank, _lane(event), event["name"], begin, duration, facts, kind, origin))
    return profile.get("baseTimeNanoseconds", 0) + round(1e3 * first), found


def _is_inside(event: dict[str, Any], whole: dict[str, Any]) -> bool:
    begin, time = float(whole["ts"]), float(event["ts"])
    return event["tid"] == whole["tid"] and begin <= time <= begin + float(whole.get("dur", 0))


def _lane(event: dict[str, Any]) -> str:
    return f"thread {event['tid']}"


def _kind(event: dict[str, Any]) -> str | None:
    return next((kind for kind, pattern in _COLLECTIVES.items() if pattern.search(event["name"])), None)


def _may_be(call: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a run may be that of a call: later, of its kind, of a tensor of its shape."""
    shapes = _shapes(run)
    return (
        _kind(call) == _kind(run)
        and float(call["ts"]) <= float(run["ts"])
        and (not shapes or any(shape in _shapes(call) for shape in shapes))
    )


def _shapes(event: dict[str, Any]) -> list[list[int]]:
    """Shapes of all tensors of a call, those in lists too."""
    found: list[list[int]] = []
    todo = [*zip(event["args"].get("Input Dims", ()), event["args"].get("Input type", ()), strict=False)]
    for dims, dtype in todo:
        if dtype == "TensorList":
            found += dims
        elif dtype not in ("", "Scalar", "ScalarList"):
            found.append(dims)
    return found


def _bytes(run: dict[str, Any], call: dict[str, Any] | None) -> int:
    """Bytes of the tensor of a collective on this rank, of the larger side; 0 where they are not known."""
    if "Collective name" in run["args"]:  # of NCCL
        args = run["args"]
        elements = max(int(args.get(f"{side} msg nelems", 0) or 0) for side in ("In", "Out"))
        return elements * _ITEM_BYTES.get(_NCCL_DTYPES.get(str(args.get("dtype")), ""), 0)
    dtypes = [dtype for dtype in run["args"].get("Input type", ()) if dtype in _ITEM_BYTES]
    shapes = [*_shapes(run), *(_shapes(call) if call is not None else ())]
    if not dtypes or not shapes:
        return 0
    return max(math.prod(shape) for shape in shapes) * _ITEM_BYTES[dtypes[0]]


class _Places:
    """Places in the forward pass at which things have their cause.

    Autograd numbers what it records: a forward operation and its function in the backward pass have the same number.

    Args:
        events: in the order of their begin.
    """

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        #: number -> forward operations; the last one made the node, those before it did not
        self._forward: dict[int, list[dict[str, Any]]] = {}
        self._backward: list[dict[str, Any]] = []
        for event in events:
            number = event.get("args", {}).get("Sequence number")
            if number is not None and event["name"].startswith("autograd::engine::evaluate_function"):
                self._backward.append(event)
            elif number is not None and not event["args"].get("Fwd thread id"):
                self._forward.setdefault(number, []).append(event)

    def of_cause(self, event: dict[str, Any]) -> tuple[str, float]:
        """Lane and time of an event; of the forward operation, where it is in the backward pass."""
        time = float(event["ts"])
        for node in reversed(self._backward):
            begin = float(node["ts"])
            if node["tid"] == event["tid"] and begin <= time <= begin + float(node["dur"]):
                before = [each for each in self._forward.get(node["args"]["Sequence number"], ()) if each["ts"] < begin]
                if before:
                    return _lane(before[-1]), float(before[-1]["ts"])
        return _lane(event), time
