"""Events of several processes as one trace."""

from __future__ import annotations

import pytest

from keras_flow.backends.engine_records import TraceEvent
from keras_flow.timeline import merge


def collectives(*found: TraceEvent) -> list[dict]:
    events: list[dict] = merge.chrome({0: (0, found)})["traceEvents"]  # type: ignore[assignment]
    return [event for event in events if event.get("cat") == "collective"]


def test_events_that_end_together_do_so_in_whole_nanoseconds() -> None:
    """An outer and an inner event, which floats tear apart: 0.1 + 0.2 is more than 0.3."""
    inner, outer = TraceEvent(0, "operations", "inner", 0.1, 0.2), TraceEvent(0, "operations", "outer", 0.0, 0.3)
    events = [event for event in merge.chrome({0: (0, [outer, inner])})["traceEvents"] if event["ph"] == "X"]  # type: ignore[index]
    assert len({event["tid"] for event in events}) == 1
    spans = {event["name"]: [int(1e3 * event[key]) for key in ("ts", "dur")] for event in events}
    assert spans == {"inner": [100, 200], "outer": [0, 300]}


def test_the_outer_one_of_two_that_begin_together_comes_first() -> None:
    inner, outer = TraceEvent(0, "operations", "inner", 1.0, 0.2), TraceEvent(0, "operations", "outer", 1.0, 0.3)
    events: list[dict] = merge.chrome({0: (0, [inner, outer])})["traceEvents"]  # type: ignore[assignment]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["outer", "inner"]


def test_each_rank_has_a_lane() -> None:
    of_ranks = {rank: (0, [TraceEvent(rank, "thread 1", "aten::add", 1.0, 2.0)]) for rank in range(3)}
    events: list[dict] = merge.chrome(of_ranks)["traceEvents"]  # type: ignore[assignment]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    drawn = [event for event in events if event["name"] == "aten::add"]
    assert sorted(event["pid"] for event in drawn) == [0, 1, 2]
    assert all((round(event["ts"], 3), round(event["dur"], 3)) == (1.0, 2.0) for event in drawn)


def test_a_process_that_began_late_is_drawn_late() -> None:
    of_ranks = {
        rank: (1_796_061_045_000_000_000 + rank * 300, [TraceEvent(rank, "t", "a", 0.0, 2.0)]) for rank in (0, 1)
    }
    events: list[dict] = merge.chrome({**of_ranks, 2: (0, [])})["traceEvents"]  # type: ignore[assignment]
    begins = {event["pid"]: event["ts"] for event in events if event["ph"] == "X"}
    assert {rank: round(begin, 3) for rank, begin in begins.items()} == {0: 0.0, 1: 0.3}


def test_events_of_no_rank_stand_in_the_lane_of_their_process() -> None:
    events: list[dict] = merge.chrome({0: (0, [TraceEvent(None, "python", "tracing", 0.0, 1.0)])})["traceEvents"]  # type: ignore[assignment]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["process 0"]


def test_a_collective_has_its_step_and_its_layer() -> None:
    found = collectives(
        TraceEvent(0, "thread 1", "step 2", 0.0, 100.0),
        TraceEvent(0, "thread 1", "layer model/up", 10.0, 50.0),
        TraceEvent(0, "thread 1", "gloo:all_reduce", 20.0, 5.0, {"bytes": 64}, "all_reduce"),
        TraceEvent(0, "thread 1", "gloo:all_reduce", 70.0, 5.0, collective="all_reduce"),
    )
    assert [event["name"] for event in found] == ["all_reduce", "all_reduce"]
    assert found[0]["args"] == {"event": "gloo:all_reduce", "bytes": 64, "step": 2, "layer": "model/up"}
    assert found[1]["args"] == {"event": "gloo:all_reduce", "step": 2}


@pytest.mark.timeout(60)
def test_many_collectives_find_their_layers_at_once() -> None:
    count = 10_000
    found = collectives(
        TraceEvent(0, "t", "layer m", 0.0, 10.0 * count),
        *(TraceEvent(0, "t", f"layer m/{at}", 10.0 * at, 9.0) for at in range(count)),
        *(TraceEvent(0, "t", "gloo:all_reduce", 10.0 * at + 5, 0.5, {}, "all_reduce") for at in range(count)),
        TraceEvent(0, "t", "gloo:all_reduce", 9.5, 0.1, {}, "all_reduce"),
        TraceEvent(0, "t", "gloo:all_reduce", 10.0 * count + 1, 0.1, {}, "all_reduce"),
    )
    layers = [event["args"].get("layer") for event in found]
    assert layers == ["m/0", "m", *(f"m/{at}" for at in range(1, count)), None]


def test_a_collective_belongs_to_what_caused_it() -> None:
    """It runs in a thread of its own, after its step; in the backward pass its layer is that of the forward pass."""
    found = collectives(
        TraceEvent(0, "thread 1", "step 1", 0.0, 100.0),
        TraceEvent(0, "thread 1", "layer model/up", 10.0, 50.0),
        TraceEvent(0, "thread 2", "gloo:all_reduce", 120.0, 5.0, {}, "all_reduce", ("thread 1", 20.0)),
        TraceEvent(0, "thread 2", "gloo:all_reduce", 130.0, 5.0, {"layer": "b"}, "all_reduce", ("thread 1", 20.0)),
    )
    assert [event["args"]["step"] for event in found] == [1, 1]
    assert [event["args"]["layer"] for event in found] == ["model/up", "b"]


def test_gradients_of_several_layers_name_them_all() -> None:
    found = collectives(
        TraceEvent(0, "thread 1", "gradients of model/up, model/down", 0.0, 10.0),
        TraceEvent(0, "thread 1", "gradients of model/up", 20.0, 10.0),
        *(TraceEvent(0, "thread 1", "gloo:all_reduce", begin, 5.0, {}, "all_reduce") for begin in (1.0, 21.0)),
    )
    assert found[0]["args"]["layers"] == ["model/up", "model/down"]
    assert found[1]["args"]["layer"] == "model/up"


def test_events_that_overlap_stand_beside_each_other() -> None:
    """Perfetto drops a complete event that overlaps one of its lane without being inside it."""
    found = [
        TraceEvent(0, "thread 1", name, begin, duration)
        for name, begin, duration in (("a", 0.0, 10.0), ("in a", 2.0, 3.0), ("over a", 8.0, 4.0), ("after", 12.0, 1.0))
    ]
    events: list[dict] = merge.chrome({0: (0, found)})["traceEvents"]  # type: ignore[assignment]
    lane = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert lane["a"] == lane["in a"] == lane["after"] != lane["over a"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        "thread 1",
        "thread 1, beside",
    ]


def test_runs_of_a_compiled_step_are_numbered_on_each_rank() -> None:
    found = collectives(
        *(
            TraceEvent(
                rank,
                "operations",
                "all-reduce.1",
                begin,
                1.0,
                {"run_id": str(run), "hlo_module": "jit_step"},
                "all_reduce",
            )
            for rank, begin, run in ((0, 5.0, 71), (0, 9.0, 72), (1, 6.0, 71), (1, 10.0, 72))
        )
    )
    assert sorted((event["pid"], event["args"]["step"]) for event in found) == [(0, 1), (0, 2), (1, 1), (1, 2)]
