"""Messages and sums that are derived from a schedule: complete, and free of deadlocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies

from keras_flow.errors import FlowError
from keras_flow.schedules import Action, Schedule
from keras_flow.schedules.action import COMPUTED, REDUCE_GRAD
from tests.schedules.test_tables import RANKS, all_of

#: a send -> its receive, and the stage that receives, seen from the sender's
PAIRS = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


def receive_of(action: Action) -> Action:
    """Return the receive that belongs to a send."""
    kind, step = PAIRS[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def left_over(lists: Sequence[Sequence[Action]]) -> list[str]:
    """Play lists whose sends and receives wait for each other; return what is never reached."""
    places = [0] * len(lists)
    moving = True
    while moving:
        moving = False
        heads = {
            order[place]: rank
            for rank, (order, place) in enumerate(zip(lists, places, strict=True))
            if place < len(order)
        }
        for action, rank in heads.items():
            if action.kind in COMPUTED or action.kind == REDUCE_GRAD:
                places[rank] += 1
                moving = True
            elif action.kind in PAIRS and receive_of(action) in heads:
                places[rank] += 1
                places[heads[receive_of(action)]] += 1
                moving = True
    return [str(order[place]) for order, place in zip(lists, places, strict=True) if place < len(order)]


def check(schedule: Schedule) -> None:
    """Each rank's work in its order, all that it needs has arrived, each message once, and no deadlock."""
    lists = schedule.lowered()
    assert left_over(lists) == []
    boundaries = sum(schedule.rank_of[s] != schedule.rank_of[s + 1] for s in range(schedule.stages - 1))
    counts = Counter(action.kind for order in lists for action in order)
    assert {counts[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")} == {boundaries * schedule.microbatches}
    assert counts[REDUCE_GRAD] == schedule.stages
    for rank, order in enumerate(lists):
        assert tuple(action for action in order if action.kind in COMPUTED) == schedule.orders[rank]
        at = {action: place for place, action in enumerate(order)}
        for action, place in at.items():
            stage, kind, part = action
            if kind == "RECV_F":
                assert place < at[Action(stage, "F", part)]
            elif kind == "SEND_F":
                assert place > at[Action(stage, "F", part)]
            elif kind in ("RECV_B", "SEND_B"):
                backward = at[Action(stage, "B" if Action(stage, "B", part) in at else "I", part)]
                assert (place < backward) == (kind == "RECV_B")
            elif kind == REDUCE_GRAD:
                assert all(at[other] < place for other in at if other.stage == stage and other.kind in "BW")


@pytest.mark.parametrize("ranks", RANKS)
def test_published_schedules(ranks: int) -> None:
    for microbatches in range(1, 17):
        for schedule in all_of(ranks, microbatches):
            check(schedule)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(strategies.data())
def test_any_schedule(data: strategies.DataObject) -> None:
    """Stages on any ranks, actions in any order that has no deadlock: drawn as a walk through what can be next."""
    ranks = data.draw(strategies.integers(1, 4))
    others = data.draw(strategies.lists(strategies.integers(0, ranks - 1), max_size=4))
    places = data.draw(strategies.permutations([*range(ranks), *others]))
    parts = data.draw(strategies.integers(1, 3))
    todo = {Action(s, kind, m) for s in range(len(places)) for m in range(parts) for kind in "FIW"}
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while todo:
        ready = sorted(action for action in todo if _needed(action, len(places)) <= done)
        action = data.draw(strategies.sampled_from(ready))
        orders[places[action.stage]].append(action)
        done.add(action)
        todo.remove(action)
    check(Schedule(orders))


def _needed(action: Action, stages: int) -> set[Action]:
    stage, kind, part = action
    if kind == "F":
        return {Action(stage - 1, "F", part)} if stage else set()
    if kind == "W":
        return {Action(stage, "I", part)}
    return {Action(stage, "F", part)} | ({Action(stage + 1, "I", part)} if stage + 1 < stages else set())


BAD = {
    "rank 0 is at 0B0, which waits for 1B0 of rank 1; rank 1 is at 1B0, which waits for 1F0": [
        ["0F0", "0B0"],
        ["1B0", "1F0"],
    ],
    "rank 0: micro-batch 1 of stage 0 needs one F and either one B.*has 1 of B": [["0F0", "0B0", "0B1"]],
    "needs one F and either .*has 2 of F, 1 of B": [["0F0", "0F0", "0B0"]],
    "needs one F and either .*has 1 of F, 1 of I": [["0F0", "0I0"]],
    "stage 0 is on rank 0 and on rank 1": [["0F0"], ["0B0"]],
    r"stages are 0, 1, 2 and so on; found \[1\]": [["1F0", "1B0"]],
    r"each rank of a schedule has a stage; ranks \[1\] have none": [["0F0", "0B0"], []],
    "each rank of a schedule has a stage; there is none": [],
    "rank 0: 0SEND_F0 is no work of a schedule": [["0F0", "0SEND_F0", "0B0"]],
    "'0 F0' is no action of a schedule: stage, F, B, I or W, and micro-batch": [["0 F0"]],
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(FlowError, match=text):
        Schedule(BAD[text])
