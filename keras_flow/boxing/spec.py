"""BoxingPlan: the frozen list of steps that every engine executes in the same way; see docs/boxing-spec.md.

A step says which layouts it joins and by which rules. All element ranges follow in closed form, so that a rank lists
its own part without asking others and without listing theirs.

Example: rank 0 of an all-gather over two ranks.

    >>> from keras_flow.boxing import plan
    >>> from keras_flow.placements import Placement
    >>> pair = Placement([0, 1])
    >>> planned = plan(Layout(pair, "S(0)", (2, 2)), Layout(pair, "B", (2, 2)))
    >>> [(m.sender, m.piece.box) for part in planned.for_rank(0) for m in part.receives], planned.bytes_received(0)
    ([(1, ((1, 2), (0, 2)))], 8)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from keras_flow.boxing.describe import describe
from keras_flow.boxing.drawing import draw
from keras_flow.boxing.json_form import read_plan, to_json
from keras_flow.boxing.messages import Message
from keras_flow.boxing.phases import receives, sends
from keras_flow.boxing.step import Step
from keras_flow.boxing.topology import Topology, plan_time
from keras_flow.layout import Layout, itemsize


@dataclass(frozen=True)
class RankPart:
    """The part of one rank in one phase of one step: element ranges of the logical tensor, and partners."""

    step: int
    kind: str
    phase: str
    keeps: tuple[Message, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class BoxingPlan:
    """How a tensor gets from one layout to another.

    Attributes:
        source, target: the layouts, of one logical shape.
        dtype: name of the element type.
        steps: in order; none where nothing has to be done.
        chosen: what the planner minimised, in words.
    """

    source: Layout
    target: Layout
    dtype: str
    steps: tuple[Step, ...]
    chosen: str = field(default="bytes, then the load of the most loaded rank", compare=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # executors look their programs up by it, each time
        return hash((self.source, self.target, self.dtype, self.steps))

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize(self.dtype)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, those of the source first."""
        before, after = self.source.placement.ranks, self.target.placement.ranks
        return before if before == after else tuple(dict.fromkeys((*before, *after)))

    def for_rank(self, rank: int) -> Iterator[RankPart]:
        """The part of one rank, phase by phase, in time proportional to its partners."""
        for number, step in enumerate(self.steps):
            for phase in step.phases:
                received = list(receives(step.exchange, rank, phase))
                yield RankPart(
                    number,
                    step.kind,
                    phase,
                    keeps=tuple(part for part in received if part.sender == rank),
                    sends=tuple(sends(step.exchange, rank, phase)),
                    receives=tuple(part for part in received if part.sender != rank),
                )

    def bytes_received(self, rank: int) -> int:
        """Bytes that `rank` receives from other ranks."""
        return self.itemsize * sum(step.elements_received(rank) for step in self.steps)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes received, summed over ranks."""
        return self.itemsize * sum(step.total for step in self.steps)

    @cached_property
    def loads(self) -> dict[int, int]:
        """Bytes that each rank receives from other ranks."""
        # without a closed form each rank's messages are counted, which takes seconds on many thousand ranks
        closed = [step.closed_loads for step in self.steps]
        return {
            rank: self.itemsize
            * sum(
                step.elements_received(rank) if loads is None else loads.get(rank, 0)
                for step, loads in zip(self.steps, closed, strict=True)
            )
            for rank in self.ranks
        }

    @cached_property
    def most_loaded(self) -> int:
        """Bytes received by the rank that receives most."""
        return max(self.loads.values())

    def some_rank_receives(self, bytes_: int) -> bool:
        """Whether `most_loaded` is at least so many bytes; without a closed form it asks ranks only up to the first."""
        if all(step.closed_loads is not None for step in self.steps):
            return self.most_loaded >= bytes_
        return any(self.bytes_received(rank) >= bytes_ for rank in self.ranks)

    def peak_bytes(self, rank: int) -> int:
        """Most bytes that `rank` needs at a time, its source shard included, messages being handled one by one."""
        peak = self._local(self.source, rank)
        for step in self.steps:
            source, target = step.exchange.source, step.exchange.target
            # both shards are there during a step: the target's is filled while the source's is read
            held = self._local(source, rank) + self._local(target, rank)
            for phase in step.phases:
                peak = max(peak, held + step.largest_message(rank, phase))
        return peak * self.itemsize

    def memory_limit(self, rank: int) -> int:
        """Bytes that no plan may exceed on `rank`: twice the larger of its source and target shard, and one message."""
        message = max((step.largest_message(rank, phase) for step in self.steps for phase in step.phases), default=0)
        return (2 * max(self._local(self.source, rank), self._local(self.target, rank)) + message) * self.itemsize

    def _local(self, layout: Layout, rank: int) -> int:
        return math.prod(layout.local_shape(rank)) if layout.placement.contains(rank) else 0

    def to_json(self) -> dict[str, object]:
        """The plan as plain data; see docs/boxing-spec.md and docs/boxing-plan.schema.json."""
        return to_json(self)

    @staticmethod
    def from_json(data: object) -> BoxingPlan:
        """The plan from its plain data.

        Raises:
            FlowError: another version, or ranges that do not fit.
        """
        return BoxingPlan(*read_plan(data))

    def explain(self) -> str:
        """The plan in words: steps, bytes, lower bound, peak memory."""
        return describe(self)

    def time(self, topology: object) -> float:
        """Modelled seconds on a topology; see `keras_flow.boxing.Topology`."""
        if not isinstance(topology, Topology):
            raise TypeError(f"plan.time takes a kf.boxing.Topology, got {type(topology).__name__}")
        return plan_time(self, topology)

    def _repr_html_(self) -> str | None:
        """Its steps as arrows between ranks, for a notebook; None, which shows the text, where the ranks are many."""
        return draw(self)

    def __str__(self) -> str:
        return self.explain()
