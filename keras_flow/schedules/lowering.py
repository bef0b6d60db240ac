"""Lowering of a schedule: adds messages between ranks, and sums of gradients, to the ranks' lists of actions.

All actions and messages are put into one order: by the time at which they would begin if all costs were equal. A
message begins when what it carries has been computed. Each rank's list is its part of that one order, and a process
that drives several ranks runs their parts as one list. So sends and receives that wait for each other never wait in a
circle, and a receive stands before the action that needs it. Two stages on two ranks, with two micro-batches:

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...
    rank 1   1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from keras_flow.schedules import timing
from keras_flow.schedules.action import (
    BACKWARD,
    FORWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHTS,
    Action,
)
from keras_flow.schedules.timing import Costs


def in_one_order(orders: Sequence[Sequence[Action]], rank_of: Mapping[int, int], stages: int) -> tuple[Action, ...]:
    """Return what all ranks do: actions, messages, and a sum of gradients behind a stage's last backward pass, if any.

    Args:
        orders: each rank's actions.
        rank_of: stage -> rank.
        stages: how many there are.
    """
    costs = Costs.of(timing.EQUAL, stages, 1)
    begun = timing.begins(orders, rank_of, stages, costs)
    last = {action.stage: action for order in orders for action in order if action.kind in (BACKWARD, WEIGHTS)}
    # time, what comes first at one time, what it belongs to, and what it is
    events: list[tuple[float, int, Action, Action]] = []
    for action, time in begun.items():
        end = time + costs[action]
        events.append((time, 2, action, action))
        events += [(end, 0, action, message) for message in _messages(action, rank_of, stages)]
        if last.get(action.stage) == action:
            events.append((end, 1, action, Action(action.stage, REDUCE_GRAD, -1)))
    return tuple(action for *_, action in sorted(events))


def _messages(action: Action, rank_of: Mapping[int, int], stages: int) -> Iterator[Action]:
    """Yield the send of what an action has computed, and the receive; nothing within a rank."""
    stage, kind, part = action
    to = stage + 1 if kind == FORWARD else stage - 1
    if kind == WEIGHTS or not 0 <= to < stages or rank_of[to] == rank_of[stage]:
        return
    sends, receives = (SEND_F, RECV_F) if kind == FORWARD else (SEND_B, RECV_B)
    yield Action(stage, sends, part)
    yield Action(to, receives, part)
