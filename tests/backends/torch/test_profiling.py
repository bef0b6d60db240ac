"""Events of torch's profiler: collectives as they ran, with bytes and the place of their call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keras_flow.backends.engine_records import TraceEvent

torch = pytest.importorskip("torch")


def event(name: str, thread: int, begin: float, duration: float, **args: object) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": thread, "ts": 100.0 + begin, "dur": duration, "args": args}


def call(begin: float, shape: list[int], number: int | None = None) -> dict[str, Any]:
    numbered = {} if number is None else {"Sequence number": number, "Fwd thread id": 0}
    dims = {"Input type": ["TensorList", "", "Scalar"], "Input Dims": [[shape], [], []]}
    return event("c10d::allreduce_", 1, begin, 1.0, **dims, **numbered)


def run(begin: float, shape: list[int], dtype: str = "float") -> dict[str, Any]:
    return event("gloo:all_reduce", 2, begin, 1.0, **{"Input type": [dtype], "Input Dims": [shape]})


def collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *events: dict[str, Any]) -> list[TraceEvent]:
    from keras_flow.backends.torch import profiling
    from keras_flow.current.world import World

    monkeypatch.setattr(profiling, "world", lambda: World(2, "cpu", (1,), 1, 2))
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [event("begin", 1, 0.0, 1.0), *events]}))
    return [found for found in profiling._events(file)[1] if found.collective is not None]


def test_a_call_and_its_run_are_one_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = collectives(tmp_path, monkeypatch, call(10, [8, 4]), run(11, [8, 4]))
    (only,) = found
    assert (only.rank, only.collective, only.begin, only.facts["bytes"]) == (1, "all_reduce", 11.0, 128)
    assert only.origin == ("thread 1", 10.0)


def test_runs_that_overtake_each_other_find_their_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = collectives(
        tmp_path, monkeypatch, call(10, [8]), call(12, [2, 14]), run(15, [2, 14], "long int"), run(16, [8])
    )
    assert [each.origin for each in found] == [("thread 1", 12.0), ("thread 1", 10.0)]
    assert [each.facts["bytes"] for each in found] == [224, 32]


def test_bytes_are_those_of_the_larger_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = event(
        "c10d::_allgather_base_",
        1,
        10,
        1.0,
        **{"Input type": ["float", "float", ""], "Input Dims": [[2, 8], [1, 8], []]},
    )
    ran = event("gloo:_all_gather_base", 2, 11, 1.0, **{"Input type": ["float"], "Input Dims": [[1, 8]]})
    (only,) = collectives(tmp_path, monkeypatch, gather, ran)
    assert (only.collective, only.facts["bytes"]) == ("all_gather", 64)


def test_the_backward_pass_has_its_cause_in_the_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations before the one that made the node have its number too, and those of an earlier step."""
    found = collectives(
        tmp_path,
        monkeypatch,
        *(
            event(name, 1, begin, 1.0, **{"Sequence number": 7, "Fwd thread id": 0})
            for name, begin in (("a", 5), ("b", 6))
        ),
        event("autograd::engine::evaluate_function: B", 3, 20, 10, **{"Sequence number": 7, "Fwd thread id": 1}),
        {**call(22, [8]), "tid": 3},
        run(23, [8]),
        event("c", 1, 40, 1.0, **{"Sequence number": 7, "Fwd thread id": 0}),
    )
    assert [each.origin for each in found] == [("thread 1", 6.0)]
