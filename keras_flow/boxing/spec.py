"""The shared specification: a plan is a frozen list of steps that every engine executes in the same way.

See docs/boxing-spec.md. A step says which layouts it joins and by which rule; all element ranges follow from them in
closed form, so that any rank can list its own part without asking and without listing the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.boxing import cost
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Message
from keras_flow.layout import Layout, itemsize

#: kind -> what it does, in its groups
KINDS = {
    "local_slice": "every rank cuts its shard out of what it holds",
    "local_keep": "one rank of each family keeps the value, the others hold zeros",
    "permute": "every rank takes over the whole shard of one rank",
    "all_gather": "every rank receives the shards of its group",
    "reduce_scatter": "summands are added, each rank ends with its block of the sum",
    "all_reduce": "summands are added, each rank ends with the whole sum",
    "all_to_all": "every rank sends a block to each rank of its group",
    "exchange": "ranks send each other the common elements of their shards, adding summands where there are any",
}


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        kind: one of `KINDS`.
        phases: the rules of `keras_flow.boxing.exchange` that it applies, in order.
        exchange: the two layouts, the axes on which groups work apart, and the table of shares.
    """

    kind: str
    phases: tuple[str, ...]
    exchange: Exchange

    @classmethod
    def of(cls, kind: str, exchange: Exchange) -> Step:
        """The step with the phases that reach the fewest receipts."""
        return cls(kind, exchange.phases, exchange)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the source's placement along which its groups extend."""
        names = self.exchange.source.placement.axis_names
        return tuple(name for axis, name in enumerate(names) if axis not in self.exchange.apart)

    @property
    def adds(self) -> bool:
        """Whether summands are added."""
        return any(phase in ("combine", "reduce", "merge") for phase in self.phases)

    @property
    def is_local(self) -> bool:
        """Whether no rank receives anything."""
        return self.kind in ("local_slice", "local_keep")

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks are sure to receive the same."""
        source, target = self.exchange.source, self.exchange.target
        even = source.divides and target.divides and self.kind not in ("permute", "exchange")
        return even and (
            self.kind != "all_reduce"
            or math.prod(target.local_shape(target.placement.ranks[0])) % self.exchange.summed == 0
        )

    def elements_received(self, rank: int) -> int:
        """Elements that `rank` receives from others."""
        return sum(sum(self._messages(rank, phase)) for phase in self.phases)

    def largest_message(self, rank: int, phase: str) -> int:
        """Elements of the largest message that `rank` receives in a phase."""
        return max(self._messages(rank, phase), default=0)

    def _messages(self, rank: int, phase: str) -> list[int]:
        """Elements of the messages that `rank` receives from others in a phase."""
        if self.exchange.source.placement.size > cost.LISTED:
            return cost.arrivals(self.exchange, rank, phase)[1].tolist()
        return [part.piece.size for part in self.exchange.receives(rank, phase) if part.sender != rank]

    @cached_property
    def total(self) -> int:
        """Elements that all ranks together receive."""
        if self.is_local:
            return 0
        if self.is_uniform:
            target = self.exchange.target.placement
            each = (cost.arrivals(self.exchange, target.ranks[0], phase)[1] for phase in self.phases)
            return target.size * int(sum(sizes.sum() for sizes in each))
        return cost.total(self.exchange)

    @cached_property
    def closed_loads(self) -> dict[int, int] | None:
        """Elements that ranks receive, of all that receive any; None where each would have to be asked."""
        found = np.zeros(0, np.int64) if self.is_local else cost.loads(self.exchange)
        return None if found is None else dict(zip(self.exchange.target.placement.ranks, found.tolist(), strict=False))

    def __str__(self) -> str:
        source, target = self.exchange.source, self.exchange.target
        groups = f" in groups along {', '.join(self.axes)}" if self.exchange.apart else ""
        note = f" ({' then '.join(self.phases)})" if self.kind == "exchange" else ""
        return f"{self.kind}{groups}: {_sbp.text(source.nd_sbp)} -> {_sbp.text(target.nd_sbp)}{note}"


@dataclass(frozen=True)
class RankPart:
    """What one rank does in one phase of one step: element ranges of the logical tensor, and partners."""

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
                received = list(step.exchange.receives(rank, phase))
                yield RankPart(
                    number,
                    step.kind,
                    phase,
                    keeps=tuple(part for part in received if part.sender == rank),
                    sends=tuple(step.exchange.sends(rank, phase)),
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

    def peak_bytes(self, rank: int) -> int:
        """Most bytes that `rank` needs at a time, its source shard included, messages being handled one by one."""
        peak = self._local(self.source, rank)
        for step in self.steps:
            source, target = step.exchange.source, step.exchange.target
            held = self._local(source, rank) + self._local(target, rank)
            for phase in step.phases:
                if phase == "combine":
                    pieces = {part.piece for part in step.exchange.receives(rank, phase)}
                    held += sum(piece.size for piece in pieces)
                peak = max(peak, held + step.largest_message(rank, phase))
        return peak * self.itemsize

    def memory_limit(self, rank: int) -> int:
        """Bytes that no plan may exceed on `rank`: twice the larger of its source and target shard, and one message."""
        message = max((step.largest_message(rank, phase) for step in self.steps for phase in step.phases), default=0)
        return (2 * max(self._local(self.source, rank), self._local(self.target, rank)) + message) * self.itemsize

    def _local(self, layout: Layout, rank: int) -> int:
        return math.prod(layout.local_shape(rank)) if layout.placement.contains(rank) else 0

    def to_json(self) -> dict:
        """The plan as plain data; see docs/boxing-spec.md and docs/boxing-plan.schema.json."""
        from keras_flow.boxing.json_form import to_json

        return to_json(self)

    @staticmethod
    def from_json(data: object) -> BoxingPlan:
        """The plan from its plain data.

        Raises:
            FlowError: another version, or ranges that do not fit.
        """
        from keras_flow.boxing.json_form import from_json

        return from_json(data)

    def explain(self) -> str:
        """The plan in words: steps, bytes, lower bound, peak memory."""
        from keras_flow.boxing.describe import describe

        return describe(self)

    def time(self, topology: object) -> float:
        """Modelled seconds on a topology; see `keras_flow.boxing.Topology`."""
        from keras_flow.boxing.topology import Topology, plan_time

        if not isinstance(topology, Topology):
            raise TypeError(f"plan.time takes a kf.boxing.Topology, got {type(topology).__name__}")
        return plan_time(self, topology)

    def __str__(self) -> str:
        return self.explain()
