"""`Schedule`: for each rank the order in which it computes stages and micro-batches."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from keras_flow import atomic
from keras_flow.errors import FlowError
from keras_flow.pictures.drawing import Drawing
from keras_flow.schedules import drawing, lowering, timing
from keras_flow.schedules.action import BACKWARD, COMPUTED, FORWARD, INPUTS, WEIGHTS, Action
from keras_flow.schedules.timing import EQUAL, Costs, ThreeCosts


@dataclass(frozen=True, repr=False)
class Schedule:
    """The order of work of a pipeline's step: for each rank its (stage, micro-batch, forward or backward).

    Messages are not in it. `lowered()` derives them, so that what is simulated is what runs.

    Args:
        orders: each rank's actions in their order.
        name: in words.

    Raises:
        FlowError: an action is missing or there twice, a stage is on two ranks, or ranks wait for one another.

    Example:
        >>> two = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        >>> two.stages, two.microbatches, two.makespan((1, 1, 1)), two.peak(0), two.peak(1)
        (2, 2, 9.0, 2.0, 1.0)
        >>> two.draw()
        0 F0 F1 ·· ·· B0 B0 ·· B1 B1
        1 ·· F0 B0 B0 F1 B1 B1 ·· ··
    """

    orders: tuple[tuple[Action, ...], ...]
    name: str = ""

    def __init__(self, orders: Sequence[Sequence[Action | str]], name: str = ""):
        read = tuple(
            tuple(action if isinstance(action, Action) else Action.parse(action) for action in order)
            for order in orders
        )
        object.__setattr__(self, "orders", read)
        object.__setattr__(self, "name", name)
        self._check()

    @property
    def ranks(self) -> int:
        """How many ranks compute."""
        return len(self.orders)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Stage -> the rank that has its layers."""
        return dict(sorted((action.stage, rank) for rank, order in enumerate(self.orders) for action in order))

    @property
    def stages(self) -> int:
        """Into how many stages the model is cut."""
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        """Into how many parts a batch is cut."""
        return 1 + max(action.microbatch for order in self.orders for action in order)

    @cached_property
    def chunks(self) -> int:
        """Stages of a rank: of the one that has the most."""
        return max(Counter(self.rank_of.values()).values())

    def makespan(self, costs: ThreeCosts = EQUAL, message: float = 0.0) -> float:
        """Return how long a step takes, in the unit of the costs.

        Args:
            costs: of F, I and W for one micro-batch: numbers for all stages of a rank together, or one for each stage.
            message: how long a message between ranks is on its way.
        """
        each = self._costs(costs, message)
        begun = timing.begins(self.orders, self.rank_of, self.stages, each)
        return max(start + each[action] for action, start in begun.items())

    def begins(self, costs: ThreeCosts = EQUAL, message: float = 0.0) -> dict[Action, float]:
        """Return when each action begins; arguments as those of `makespan`."""
        return timing.begins(self.orders, self.rank_of, self.stages, self._costs(costs, message))

    def bubble(self, costs: ThreeCosts = EQUAL, message: float = 0.0) -> float:
        """Return the share of the step in which the rank with the least work has nothing to do.

        Example:
            >>> from keras_flow import schedules
            >>> round(schedules.one_f_one_b(4, 8).bubble(), 3)
            0.273
        """
        each = self._costs(costs)
        return 1 - min(sum(each[action] for action in order) for order in self.orders) / self.makespan(costs, message)

    def peak(self, rank: int, gradients: float = 0.0) -> float:
        """Return how many micro-batches' activations a rank holds at most.

        From F on a rank holds what its stage has computed, to the end of B or W. Between I and W it also holds the
        gradients by each layer's output, which published figures leave out.

        Args:
            rank: which.
            gradients: what those take, as a share of the activations; 0 as published.

        Returns:
            Micro-batches of all of the rank's stages.
        """
        held = most = 0.0
        for _, kind, _ in self.orders[rank]:
            held += {FORWARD: 1.0, BACKWARD: -1.0, INPUTS: gradients, WEIGHTS: -1.0 - gradients}[kind]
            most = max(most, held)
        return most / self.chunks

    def lowered(self) -> tuple[tuple[Action, ...], ...]:
        """Return each rank's list with messages and sums of gradients, as an engine runs it.

        Example:
            >>> two = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
            >>> [" ".join(map(str, order)) for order in two.lowered()]
            ['0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD', '1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD']
        """
        order = lowering.in_one_order(self.orders, self.rank_of, self.stages)
        return tuple(
            tuple(action for action in order if self.rank_of[action.stage] == rank) for rank in range(self.ranks)
        )

    def draw(self, costs: ThreeCosts = EQUAL) -> Drawing:
        """Return a picture: a row for each rank, time to the right. Notebooks show it, its text is for a terminal."""
        return drawing.draw(self, self._costs(costs), self.begins(costs))

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the schedule in the CSV format of `torch.distributed.pipelining`: a line for each rank.

        Args:
            path: a file that it is written to as well.
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.orders)
        if path is not None:
            atomic.write_text(Path(path), text.getvalue())
        return text.getvalue()

    def __repr__(self) -> str:
        counts = f"ranks={self.ranks}, stages={self.stages}, microbatches={self.microbatches}"
        return f"Schedule({self.name}{': ' if self.name else ''}{counts})"

    def _costs(self, costs: ThreeCosts, message: float = 0.0) -> Costs:
        return Costs.of(costs, self.stages, self.chunks, message)

    def _check(self) -> None:
        if not self.orders or not all(self.orders):
            idle = [rank for rank, order in enumerate(self.orders) if not order]
            raise FlowError(f"each rank of a schedule has a stage; {f'ranks {idle} have' if idle else 'there is'} none")
        for rank, order in enumerate(self.orders):
            for action in order:
                if action.kind not in COMPUTED or action.microbatch < 0:
                    raise FlowError(
                        f"rank {rank}: {action} is no work of a schedule, which has F, B, I and W; messages are derived"
                    )
                if self.rank_of[action.stage] != rank:
                    raise FlowError(f"stage {action.stage} is on rank {rank} and on rank {self.rank_of[action.stage]}")
        if list(self.rank_of) != list(range(self.stages)):
            raise FlowError(f"stages are 0, 1, 2 and so on; found {list(self.rank_of)}")
        counts = Counter(action for order in self.orders for action in order)
        for stage, rank in self.rank_of.items():
            for part in range(self.microbatches):
                one = {kind: counts[Action(stage, kind, part)] for kind in COMPUTED}
                whole = one[FORWARD] == 1 and (one[BACKWARD], one[INPUTS], one[WEIGHTS]) in ((1, 0, 0), (0, 1, 1))
                if not whole:
                    has = ", ".join(f"{count} of {kind}" for kind, count in one.items() if count) or "nothing"
                    raise FlowError(
                        f"rank {rank}: micro-batch {part} of stage {stage} needs one F and either one B, or one I and "
                        f"one W; the schedule has {has}"
                    )
        self.begins()


def from_csv(source: str | Path, name: str = "") -> Schedule:
    r"""Read a schedule from a CSV file, as `Schedule.to_csv` and `torch.distributed.pipelining` write it.

    Messages, sums of gradients and gathers of weights in it are left out, since they are derived; empty cells too.

    Args:
        source: the file, or its text where that has lines.
        name: in words.

    Raises:
        FlowError: there is no such file, or it is no schedule.

    Example:
        >>> from_csv("0F0,0B0\n1F0,1B0\n")
        Schedule(ranks=2, stages=2, microbatches=1)
    """
    text = source if isinstance(source, str) and "\n" in source else _read(Path(source))
    # a line in between is of a rank, also where it is empty
    rows = csv.reader(io.StringIO(text.strip("\r\n") + "\n"))
    orders = [[action for cell in row for action in _actions(cell)] for row in rows]
    return Schedule(orders, name)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise FlowError(f"the schedule {str(path)!r} cannot be read: {error.strerror}") from error


def _actions(cell: str) -> list[Action]:
    """Actions of a cell: torch writes a pair that may overlap as `(0F1;2B0)OVERLAP_F_B`."""
    inner = cell.strip().removesuffix("OVERLAP_F_B").strip("()")
    read = [Action.parse(part) for part in inner.split(";") if part]
    return [action for action in read if action.kind in COMPUTED]
