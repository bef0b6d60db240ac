"""Perfetto's own reader takes the traces, and drops nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from keras_flow.backends.engine_records import TraceEvent
from keras_flow.timeline import merge
from tests.timeline import perfetto

pytestmark = [pytest.mark.timeout(280), pytest.mark.skipif(bool(perfetto.missing()), reason=perfetto.missing())]


def written(folder: Path, events: list[dict]) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_reader_tells_what_it_drops(tmp_path: Path) -> None:
    """Else the other tests would prove nothing."""
    events = [{"name": name, "ph": "X", "pid": 0, "tid": 1, "ts": ts, "dur": 10} for name, ts in (("a", 0), ("b", 5))]
    (lost,) = perfetto.query(written(tmp_path, events), perfetto.LOST)
    assert lost == [{"name": "slice_drop_overlapping_complete_event", "value": 1}]
    with pytest.raises(RuntimeError, match="nowhere"):
        perfetto.query(written(tmp_path, events), "select * from nowhere")


def test_lanes_and_facts_arrive(tmp_path: Path) -> None:
    found = [
        TraceEvent(1, "thread 1", "step 1", 0.0, 10.0),
        TraceEvent(1, "thread 1", "over", 8.0, 4.0),
        TraceEvent(1, "thread 2", "gloo:all_reduce", 2.0, 3.0, {"bytes": 64, "layer": "model/up"}, "all_reduce"),
    ]
    events: list[dict] = merge.chrome({0: (0, found)})["traceEvents"]  # type: ignore[assignment]
    lost, slices, facts = perfetto.query(
        written(tmp_path, events),
        perfetto.LOST,
        "select slice.name as name, dur, process.name as lane from slice join thread_track on track_id = "
        "thread_track.id join thread using (utid) join process using (upid) order by ts, dur, slice.name",
        "select key, display_value from args where key like 'args.%' order by key",
    )
    assert lost == []
    assert [(row["name"], row["dur"], row["lane"]) for row in slices] == [
        ("step 1", 10000, "rank 1"),
        ("all_reduce", 3000, "rank 1"),
        ("gloo:all_reduce", 3000, "rank 1"),
        ("over", 4000, "rank 1"),
    ]
    assert {"args.bytes": "64", "args.layer": "model/up", "args.step": "1"}.items() <= {
        str(row["key"]): row["display_value"] for row in facts
    }.items()


def test_events_that_begin_and_end_together_arrive(tmp_path: Path) -> None:
    """Generated, of two processes: events of no duration, within a nanosecond, inside and across each other."""
    draw = random.Random(0)
    durations = [0.0, 1e-5, 5e-4, 0.001, 0.0015, 0.01, 0.1]

    def made(ranks: Sequence[int | None]) -> list[TraceEvent]:
        kinds = [draw.choice([None, "all_reduce"]) for _ in range(2000)]
        return [
            TraceEvent(draw.choice(ranks), draw.choice("ab"), f"event {at}", draw.random(), length, collective=kind)
            for at, kind in enumerate(kinds)
            for length in [draw.choice(durations)]
        ]

    events: list[dict] = merge.chrome({0: (7, made([None, 0, 1])), 1: (3000, made([None, 2, 3]))})["traceEvents"]  # type: ignore[assignment]
    by_process = "select pid, count(*) as slices from slice join thread_track on track_id = thread_track.id "
    by_process += "join thread using (utid) join process using (upid) group by pid order by pid"
    lost, drawn = perfetto.query(written(tmp_path, events), perfetto.LOST, by_process)
    assert lost == []
    counted = Counter(event["pid"] for event in events if event["ph"] == "X")
    assert [(row["pid"], row["slices"]) for row in drawn] == sorted(counted.items())
