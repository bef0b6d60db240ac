"""A schedule by a greedy list scheduler, for costs that are not equal and for a given memory.

The step is played through: of all that could run next, what can begin first is put on its rank's list. Ties are broken
by an order of F, I and W. W waits until a rank has nothing else, or until what it holds is close to the memory. A rank
starts no micro-batch on an earlier stage that would take the room which a later one needs to finish.

No rule is the best for all costs, so several are tried, and the caller keeps the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from keras_flow.schedules import timing
from keras_flow.schedules.action import FORWARD, INPUTS, WEIGHTS, Action
from keras_flow.schedules.timing import Costs

_KINDS = (FORWARD, INPUTS, WEIGHTS)


class Rule(NamedTuple):
    """How ties are broken.

    Attributes:
        first: F, I and W, the first of which goes first.
        spare: room of so many micro-batches is left before W goes first.
        kept: room of so many micro-batches that an earlier stage of a rank leaves to a later one.
    """

    first: tuple[str, ...]
    spare: int
    kept: int


#: the rules that are tried, those first that were best for most costs
RULES = tuple(
    Rule(tuple(first), spare, kept) for kept, spare, first in product((1, 0, 2), (0, 1), ("FIW", "IFW", "IWF"))
)


def play(
    places: Sequence[int], microbatches: int, costs: Costs, rooms: Sequence[int], rule: Rule
) -> tuple[float, list[list[Action]]] | None:
    """Return how long a step takes by one rule, and each rank's list; None where it comes to a halt.

    Args:
        places: each stage's rank.
        microbatches: into how many parts a batch is cut.
        costs: the costs of the actions.
        rooms: chunks of micro-batches that each rank may hold.
        rule: how ties are broken.
    """
    game = _Game(places, microbatches, costs, rooms, rule)
    for _ in range(3 * len(places) * microbatches):
        if not game.move():
            return None
    return max(game.free), game.orders


class _Game:
    """A step that is being played through."""

    def __init__(self, places: Sequence[int], microbatches: int, costs: Costs, rooms: Sequence[int], rule: Rule):
        ranks = max(places) + 1
        self.rank_of = dict(enumerate(places))
        self.microbatches, self.costs, self.rooms, self.rule = microbatches, costs, rooms, rule
        self.own = [[stage for stage, rank in enumerate(places) if rank == one] for one in range(ranks)]
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.free = [0.0] * ranks
        self.held = [0] * ranks
        self.next = {kind: [0] * len(places) for kind in _KINDS}
        self.ended: dict[Action, float] = {}
        #: rank -> its best move
        self.moves = [self._best(rank) for rank in range(ranks)]

    def move(self) -> bool:
        """Put the action that can begin first on its rank's list; False where there is none."""
        best = min((move for move in self.moves if move is not None), default=None)
        if best is None:
            return False
        begin, _, _, action = best
        rank = self.rank_of[action.stage]
        self.free[rank] = self.ended[action] = begin + self.costs[action]
        self.orders[rank].append(action)
        self.next[action.kind][action.stage] += 1
        self.held[rank] += {FORWARD: 1, INPUTS: 0, WEIGHTS: -1}[action.kind]
        near = (action.stage - 1, action.stage, action.stage + 1)
        for other in {self.rank_of[stage] for stage in near if stage in self.rank_of}:
            self.moves[other] = self._best(other)
        return True

    def _best(self, rank: int) -> tuple[float, int, int, Action] | None:
        is_full = self.held[rank] >= self.rooms[rank] - self.rule.spare
        found = []
        for stage in self.own[rank]:
            for kind in _KINDS:
                part = self.next[kind][stage]
                if part >= self.microbatches or (kind == FORWARD and not self._has_room(rank, stage)):
                    continue
                action = Action(stage, kind, part)
                arrival = timing.arrival(action, self.ended, self.rank_of, len(self.rank_of), self.costs.message)
                if arrival is None:
                    continue
                priority = -1 if kind == WEIGHTS and is_full else self.rule.first.index(kind)
                # of a rank's stages the one that is nearer to the end of its pass
                nearer = -stage if kind == FORWARD else stage
                found.append((max(self.free[rank], arrival), priority, nearer, action))
        return min(found, default=None)

    def _has_room(self, rank: int, stage: int) -> bool:
        if self.held[rank] >= self.rooms[rank]:
            return False
        last = self.own[rank][-1]
        is_ahead = self.next[FORWARD][last] < self.next[FORWARD][stage]
        return not (stage < last and is_ahead and self.held[rank] >= self.rooms[rank] - 1 - self.rule.kept)
