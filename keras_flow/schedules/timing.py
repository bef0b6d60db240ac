"""When each action of a schedule begins and ends, were nothing but its order and the costs to decide it.

Each rank works through its list. An action begins when the one before it has ended, and what it needs is there:

    F of a stage     the F of the stage before
    B, I             the F of its stage, and B or I of the stage behind
    W                the I of its stage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_flow.errors import FlowError
from keras_flow.schedules.action import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action

#: a number for all ranks, or one for each stage
Cost = float | Sequence[float]
#: of F, I and W
ThreeCosts = Sequence[Cost]
EQUAL = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Costs:
    """The time that the actions of each stage take, in any unit.

    Attributes:
        forward: the time of F, for each stage.
        inputs: that of I.
        weights: that of W. B takes as long as I and W together.
        message: how long a message between two ranks is on its way.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    message: float = 0.0

    @classmethod
    def of(cls, costs: ThreeCosts, stages: int, chunks: int, message: float = 0.0) -> Costs:
        """Read the costs that a program gives.

        Args:
            costs: of F, I and W: each a number, what all stages of a rank take together, or one for each stage.
            stages: how many there are.
            chunks: stages of a rank.
            message: time of a message.

        Raises:
            FlowError: they are not three, not as many as stages, or not positive.

        Example:
            >>> Costs.of((1, [3, 1], 0), stages=2, chunks=1).inputs
            (3.0, 1.0)
        """
        given = list(costs)
        if len(given) != 3:
            raise FlowError(f"costs are three, of F, I and W (forward, backward by inputs, by weights); got {given}")
        each = [tuple(map(float, c)) if isinstance(c, Sequence) else (c / chunks,) * stages for c in given]
        if any(len(one) != stages for one in each):
            raise FlowError(f"a cost is one number, or one for each of {stages} stages; got {given}")
        if any(not value >= 0 for one in each for value in one) or not min(each[0]) > 0 or not message >= 0:
            raise FlowError(f"costs are not negative, and that of F is positive; got {given}, message={message}")
        return cls(each[0], each[1], each[2], message)

    def __getitem__(self, action: Action) -> float:
        stage, kind, _ = action
        if kind == FORWARD:
            return self.forward[stage]
        return (self.inputs[stage] if kind != WEIGHTS else 0.0) + (self.weights[stage] if kind != INPUTS else 0.0)


def needs(action: Action, stages: int) -> list[Action]:
    """Return what must have been computed before an action; of B and I either will do.

    Example:
        >>> [str(needed) for needed in needs(Action(1, "I", 0), stages=3)]
        ['1F0', '2B0', '2I0']
    """
    stage, kind, part = action
    if kind == FORWARD:
        return [Action(stage - 1, FORWARD, part)] if stage else []
    if kind == WEIGHTS:
        return [Action(stage, INPUTS, part)]
    behind = [Action(stage + 1, BACKWARD, part), Action(stage + 1, INPUTS, part)] if stage + 1 < stages else []
    return [Action(stage, FORWARD, part), *behind]


def begins(
    orders: Sequence[Sequence[Action]], rank_of: Mapping[int, int], stages: int, costs: Costs
) -> dict[Action, float]:
    """Return when each action begins.

    Args:
        orders: each rank's actions, in their order.
        rank_of: stage -> rank.
        stages: how many there are.
        costs: the costs of the actions.

    Raises:
        FlowError: ranks wait for one another: which, and for what.
    """
    begun: dict[Action, float] = {}
    ended: dict[Action, float] = {}
    free = [0.0] * len(orders)
    place = [0] * len(orders)
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                there = arrival(action, ended, rank_of, stages, costs.message)
                if there is None:
                    break
                begun[action] = max(free[rank], there)
                free[rank] = ended[action] = begun[action] + costs[action]
                place[rank] += 1
                moving = True
    stuck = {rank: order[place[rank]] for rank, order in enumerate(orders) if place[rank] < len(order)}
    if stuck:
        raise FlowError(
            "the schedule deadlocks: " + "; ".join(_waits(a, r, ended, rank_of, stages) for r, a in stuck.items())
        )
    return begun


def arrival(
    action: Action, ended: Mapping[Action, float], rank_of: Mapping[int, int], stages: int, message: float
) -> float | None:
    """Return when all that an action needs has arrived; None while something is not computed.

    Args:
        action: which.
        ended: when each action ended that has been computed.
        rank_of: stage -> rank.
        stages: how many there are.
        message: how long a message between ranks is on its way.
    """
    times: dict[int, float] = {}
    stages_needed = set()
    for needed in needs(action, stages):
        stages_needed.add(needed.stage)
        if needed in ended:
            apart = rank_of[needed.stage] != rank_of[action.stage]
            times[needed.stage] = ended[needed] + (message if apart else 0.0)
    return max(times.values(), default=0.0) if len(times) == len(stages_needed) else None


def _waits(action: Action, rank: int, ended: Mapping[Action, float], rank_of: Mapping[int, int], stages: int) -> str:
    missing = {n.stage: n for n in reversed(needs(action, stages))}
    there = {needed.stage for needed in needs(action, stages) if needed in ended}
    texts = [f"{needed} of rank {rank_of[stage]}" for stage, needed in missing.items() if stage not in there]
    return f"rank {rank} is at {action}, which waits for {' and '.join(texts)}"
