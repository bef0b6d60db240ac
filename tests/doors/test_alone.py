"""A door that one process opens alone works, or all processes are told within 10 s; nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doors import alone
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
LAYOUTS = ("dp4", "2x2")
#: one of each kind: what needs nobody, what reads split weights, steps, global tensors, collectives
FIXED = (
    ("Model.predict", "dp4"),
    ("Model.evaluate", "dp4"),
    ("Model.evaluate", "2x2"),
    ("Model.save", "2x2"),
    ("model.save()", "dp4"),
    ("Model.get_metrics_result", "dp4"),
    ("Layer.get_weights", "dp4"),
    ("GlobalTensor.numpy", "dp4"),
    ("kf.rand", "dp4"),
    ("kf.comm.all_reduce", "dp4"),
    ("kf.comm.recv", "dp4"),
)
_DOORS = alone.doors()
#: doors that are opened in one start of an engine
_SIZE = 40


def test_every_public_name_has_a_call_or_a_reason() -> None:
    assert [name for name in alone.public() if name not in alone.CALLS and name not in alone.REASONS] == []
    assert [name for name in alone.REASONS if name in alone.CALLS or name not in alone.public()] == []


def _line(status: str, then: str, after: float, then_after: float, text: str = "needs all") -> dict[str, Any]:
    rest = {"status": then, "text": text, "after": then_after}
    return {"door": "a", "layout": "dp4", "status": status, "text": text, "after": after, "then": rest}


@pytest.mark.parametrize(
    ("status", "then", "after", "then_after", "text", "said"),
    [
        ("works", "works", 1.0, 9.0, "", ""),
        ("works", "works", 61.0, 9.0, "", "worked after 61.0 s"),
        ("works", "refused", 2.0, 10.0, "needs all", ""),
        ("works", "refused", 2.0, 13.0, "needs all", "told after 13.0 s"),
        ("works", "refused", 2.0, 9.0, "other", "then: "),
        ("refused", "refused", 9.0, 9.0, "needs all", ""),
        ("refused", "refused", 9.0, 11.0, "needs all", "told after 11.0 s"),
        ("refused", "works", 9.0, 1.0, "other", ""),
        ("refused", "works", 11.0, 1.0, "other", "told after 11.0 s"),
        ("refused", "works", 1.0, 1.0, "needs all", "only process 0 was told"),
        ("crash", "works", 1.0, 1.0, "", "crash: "),
    ],
)
def test_every_outcome_is_timed(status: str, then: str, after: float, then_after: float, text: str, said: str) -> None:
    line = _line(status, then, after, then_after, text)
    found = alone.wrong(line, line)
    assert found.startswith(said) and bool(found) == bool(said)


def test_what_needs_nobody_is_not_refused() -> None:
    line = _line("refused", "refused", 1.0, 1.0)
    assert set(alone.NEEDS_NOBODY) <= set(_DOORS)
    for door in alone.NEEDS_NOBODY:
        assert alone.wrong({**line, "door": door}, line).startswith("needs nobody"), door
        assert alone.wrong({**line, "door": door, "layout": "2x2"}, line) == ""


@pytest.mark.timeout(400)
def test_a_fixed_part_by_one_rank_of_four(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    assert alone.faults(on_ranks("torch"), FIXED, tmp_path) == {}


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", range(0, len(_DOORS), _SIZE))
@pytest.mark.parametrize("engine", ENGINES)
def test_every_door_by_one_process_of_two(
    engine: str, start: int, layout: str, two_processes: Callable[[str, int], Pool], tmp_path: Path
) -> None:
    tasks = [(door, layout) for door in _DOORS[start : start + _SIZE]]
    assert alone.faults(two_processes(engine, 2), tasks, tmp_path) == {}
