"""What processes that drive several ranks do, one after the other: none waits for what another does only later."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from keras_flow import schedules
from keras_flow.pipelines import passes
from keras_flow.schedules import Action, Schedule, timing
from keras_flow.schedules.action import SEND_B, SEND_F
from keras_flow.schedules.lowering import in_one_order


@pytest.fixture(autouse=True)
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed."""
    monkeypatch.setattr(passes, "backend", lambda: SimpleNamespace(annotated=lambda name: contextlib.nullcontext()))


def _done(order: tuple[Action, ...], own: set[int], lanes: list[int]) -> list[tuple[int, Action]]:
    """What `follow` does in a process with some stages, where the lanes have rows of so many micro-batches."""
    done: list[tuple[int, Action]] = []

    def run(number: int, rows: int) -> Any:
        return SimpleNamespace(
            lane=SimpleNamespace(rank=lambda stage: stage, finish=lambda: None),
            has_part_in=lambda action: action.stage in own and action.microbatch < rows,
            do=lambda action, sums: done.append((number, action)),
        )

    passes.follow([run(number, rows) for number, rows in enumerate(lanes)], order)
    return done


def _stuck(schedule: Schedule, order: tuple[Action, ...], process_of: Mapping[int, int], lanes: list[int]) -> list[str]:
    """Play the processes, where what needs a message waits for its send; the actions that are never reached."""
    home = {stage: process_of[rank] for stage, rank in schedule.rank_of.items()}
    processes = set(home.values())
    left = {p: _done(order, {stage for stage in home if home[stage] == p}, lanes)[::-1] for p in processes}
    sent: set[tuple[int, Action]] = set()
    moving = True
    while moving:
        moving = False
        for waiting in left.values():
            while waiting and _needed(schedule, waiting[-1]) <= sent:
                sent.add(waiting.pop())
                moving = True
    return [str(waiting[-1]) for waiting in left.values() if waiting]


def _needed(schedule: Schedule, what: tuple[int, Action]) -> set[tuple[int, Action]]:
    """The sends that must have been done before an action."""
    lane, (stage, kind, part) = what
    source, send = (stage - 1, SEND_F) if kind == "F" else (stage + 1, SEND_B)
    if kind not in "FBI" or schedule.rank_of.get(source, schedule.rank_of[stage]) == schedule.rank_of[stage]:
        return set()
    return {(lane, Action(source, send, part))}


@pytest.mark.parametrize(("ranks", "processes"), [(4, 2), (6, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("parts", [3, 16])
def test_processes_with_several_ranks_do_not_wait_in_a_circle(ranks: int, processes: int, parts: int) -> None:
    size = ranks // processes
    cyclic, blocks = ({r: r % processes for r in range(ranks)}, {r: r // size for r in range(ranks)})
    for schedule in (
        schedules.gpipe(ranks, parts),
        schedules.one_f_one_b(ranks, parts),
        schedules.zbv(ranks, parts),
        *(schedules.interleaved(ranks, parts, chunks) for chunks in (2, 3)),
        *(schedules.zb1p(ranks, parts, chunks) for chunks in (1, 2)),
        schedules.gpipe_on([0, 2, 1, *range(3, ranks)], parts),  # placed by hand
    ):
        order = in_one_order(schedule.orders, schedule.rank_of, schedule.stages)
        for process_of in (blocks, cyclic):
            for few in {0, 1, parts // 2, parts}:
                assert _stuck(schedule, order, process_of, [parts, few]) == []


@pytest.mark.parametrize("schedule", [schedules.interleaved(4, 8, 2), schedules.zbv(4, 8), schedules.one_f_one_b(4, 8)])
def test_a_forward_pass_alone_is_a_pipeline(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate` and `predict`: ranks compute at one time, in the order in which the schedule has them."""
    from keras_flow.pipelines import staged_model

    seen: list[Any] = []
    monkeypatch.setattr(staged_model, "in_one_order", lambda orders, *_: seen.append(orders) or ())
    staged = object.__new__(staged_model.StagedModel)
    staged.stages, staged._orders, staged.schedule = [None] * schedule.stages, {}, schedule  # type: ignore[list-item]
    staged._order(6, with_backward=False)
    assert {(a.kind, a.microbatch < 6) for order in seen[0] for a in order} == {("F", True)}
    costs = timing.Costs.of((1, 1, 1), schedule.stages, schedule.chunks)
    begun = timing.begins(seen[0], schedule.rank_of, schedule.stages, costs)
    assert max(begun.values()) + 1 / schedule.chunks <= 6 + 3 + 1  # one after the other would be 24
