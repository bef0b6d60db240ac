"""Merges the events of all processes into one trace: a lane for each rank, collectives with their step and layer."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from keras_flow.backends.engine_records import TraceEvent

T = TypeVar("T")

_STEP = re.compile(r"^step (\d+)$")  # an annotation of the user's may begin with the word
_LAYER, _GRADIENTS = (re.compile(f"^{text} (.+)$") for text in ("layer", "gradients of"))


def chrome(processes: Mapping[int, tuple[int, Sequence[TraceEvent]]]) -> dict[str, object]:
    """The trace in Chrome's format.

    Args:
        processes: process index -> when its own profile began, in nanoseconds of one clock, and its events.
    """
    began = min((origin for origin, found in processes.values() if found), default=0)
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[int, str], int] = {}
    for index, (origin, found) in processes.items():
        drawn = [
            (event, "collectives", str(event.collective), "collective", {"event": event.name, **facts})
            for event, facts in _collectives(found)
        ]
        drawn += [(event, event.lane, event.name, "operation", dict(event.facts)) for event in found]
        for event, lane, name, kind, facts in drawn:
            owner = _HOST + index if event.rank is None else event.rank
            # not 0 and no number of two ranks: Perfetto takes thread 0 of process P for thread P
            tid = lanes.setdefault((owner, lane), len(lanes) + 1)
            shown = {"name": name, "ph": "X", "pid": owner, "tid": tid, "cat": kind, "args": facts}
            events.append({**shown, **_span(event, origin - began)})
    for (owner, lane), tid in lanes.items():
        events.append({"name": "thread_name", "ph": "M", "pid": owner, "tid": tid, "args": {"name": lane}})
    events += _beside(events, len(lanes) + 1)
    for owner in sorted({owner for owner, _ in lanes}):
        name = f"process {owner - _HOST}" if owner >= _HOST else f"rank {owner}"
        events.append({"name": "process_name", "ph": "M", "pid": owner, "args": {"name": name}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": owner, "args": {"sort_index": owner}})
    # of those that begin together the outer one first: Perfetto takes them in this order
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _beside(events: Sequence[dict[str, Any]], tid: int) -> list[dict[str, Any]]:
    """Move events that overlap another one of their lane, and are not inside it, to lanes beside it; returns the lanes.

    In Chrome's format complete events of a lane nest, and Perfetto drops those that do not.

    Args:
        events: all of the trace; changed in place.
        tid: the first number that no lane has.
    """
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    names = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event
    new: list[dict[str, Any]] = []
    for place, found in lanes.items():
        ends: list[list[int]] = [[]]  # of the lane and of each beside it: where the events end that are open
        tids = [place[1]]
        spans = [(round(1e3 * event["ts"]), round(1e3 * event["dur"]), event) for event in found]
        for begin, duration, event in sorted(spans, key=lambda span: (span[0], -span[1])):
            end = begin + duration
            for open_ends in ends:
                while open_ends and open_ends[-1] <= begin:
                    open_ends.pop()
            row = next((row for row, open_ends in enumerate(ends) if not open_ends or end <= open_ends[-1]), len(ends))
            if row == len(ends):
                ends.append([])
                tids.append(tid)
                name = {"name": f"{names[place]['args']['name']}, beside"}
                new.append({**names[place], "tid": tid, "args": name})
                tid += 1
            ends[row].append(end)
            event["tid"] = tids[row]
    return new


def _span(event: TraceEvent, late: int) -> dict[str, float]:
    """Begin and duration in microseconds, both whole nanoseconds: those that end together do so when read again.

    A tenth of a nanosecond is added, since Perfetto cuts off what is below one.

    Args:
        event: what is drawn.
        late: nanoseconds by which its process began later than the first one.
    """
    begin, end = round(1e3 * event.begin), round(1e3 * (event.begin + event.duration))
    return {"ts": (late + begin + 0.1) / 1e3, "dur": (end - begin + 0.1) / 1e3}


#: numbers of lanes that belong to a process and to no rank begin here
_HOST = 1_000_000


def _collectives(found: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, dict[str, object]]]:
    """The collectives, which get a lane of their own, with what is known of each."""
    steps = [(event, int(match[1])) for event in found if (match := _STEP.match(event.name))]
    layers = [(event, ("layer", match[1])) for event in found if (match := _LAYER.match(event.name))]
    layers += [(event, _layers(match[1])) for event in found if (match := _GRADIENTS.match(event.name))]
    runs, step_of = _runs(found), _innermost(steps)
    lanes = {outer.lane for outer, _ in layers}
    layer_of = {lane: _innermost([pair for pair in layers if pair[0].lane == lane]) for lane in lanes}
    for event in found:
        if event.collective is None:
            continue
        facts = dict(event.facts)
        lane, time = event.origin or (event.lane, event.begin)
        run = facts.get("run_id")
        # a program is started before it runs: where the engine numbers its runs that is the step
        step = runs.get((event.rank, run)) if run is not None else step_of(time)
        if step is not None:
            facts["step"] = step
        if "layer" not in facts and "layers" not in facts:
            whose = layer_of[lane](time) if lane in layer_of else None
            facts |= dict([whose] if whose is not None else [])
        yield event, facts


def _layers(paths: str) -> tuple[str, object]:
    return ("layers", paths.split(", ")) if ", " in paths else ("layer", paths)


def _runs(found: Sequence[TraceEvent]) -> dict[tuple[int | None, object], int]:
    """rank and run of the training step's program -> its number, from 1."""
    first: dict[tuple[int | None, object], float] = {}
    for event in found:
        run = event.facts.get("run_id")
        if run is not None and "step" in str(event.facts.get("hlo_module", "")):
            first[event.rank, run] = min(event.begin, first.get((event.rank, run), event.begin))
    numbers: dict[tuple[int | None, object], int] = {}
    counts: dict[int | None, int] = {}
    for rank, run in sorted(first, key=lambda key: first[key]):
        counts[rank] = counts.get(rank, 0) + 1
        numbers[rank, run] = counts[rank]
    return numbers


def _innermost(ranges: Sequence[tuple[TraceEvent, T]]) -> Callable[[float], T | None]:
    """A function that returns the value of the innermost range around a time; None where there is no such range.

    Ranges nest, as those of a thread do.
    """
    times, around = [-math.inf], list[tuple[float, T]]()
    values: list[T | None] = [None]

    def close(until: float) -> None:
        while around and around[-1][0] <= until:
            times.append(min(math.nextafter(around.pop()[0], math.inf), until))
            values.append(around[-1][1] if around else None)

    for outer, value in sorted(ranges, key=lambda pair: (pair[0].begin, -pair[0].duration)):
        close(outer.begin)
        end = outer.begin + outer.duration
        around.append((min(end, around[-1][0]) if around else end, value))
        times.append(outer.begin)
        values.append(value)
    close(math.inf)
    return lambda time: values[bisect.bisect_right(times, time) - 1]
