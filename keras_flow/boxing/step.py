"""Step: one step of a plan, a named kind of exchange between two layouts.

>>> from keras_flow.layout import Layout
>>> from keras_flow.placements import Placement
>>> mesh = Placement([[0, 1], [2, 3]])
>>> exchange = Exchange(Layout(mesh, "P,B", (4, 4)), Layout(mesh, "B,B", (4, 4)), apart=(1,))
>>> print(Step.of("all_reduce", exchange))
all_reduce in groups along axis0: P,B -> B,B
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.boxing import cost
from keras_flow.boxing.arrivals import message_sizes
from keras_flow.boxing.exchange import Exchange


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        kind: a name of `collectives.KINDS`.
        phases: the rules of `phases.py` that it applies, in order.
        exchange: the two layouts, and the axes on which groups work apart.
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
    def is_local(self) -> bool:
        """Whether no rank receives anything."""
        return self.kind in ("local_slice", "local_keep")

    def elements_received(self, rank: int) -> int:
        """Elements that `rank` receives from others."""
        return sum(sum(message_sizes(self.exchange, rank, phase)) for phase in self.phases)

    def largest_message(self, rank: int, phase: str) -> int:
        """Elements of the largest message that `rank` receives in a phase."""
        return max(message_sizes(self.exchange, rank, phase), default=0)

    @cached_property
    def total(self) -> int:
        """Elements that all ranks together receive."""
        # a local step is an exchange in which every rank holds what it wants
        return 0 if self.is_local else cost.total(self.exchange)

    @cached_property
    def closed_loads(self) -> dict[int, int] | None:
        """Rank of the target -> elements that it receives, empty if no rank receives any.

        None where there is no closed form, so that each rank must be asked by `elements_received`.
        """
        loads = np.zeros(0, np.int64) if self.is_local else cost.loads(self.exchange)
        return None if loads is None else dict(zip(self.exchange.target.placement.ranks, loads.tolist(), strict=False))

    def __str__(self) -> str:
        source, target = self.exchange.source, self.exchange.target
        groups = f" in groups along {', '.join(self.axes)}" if self.exchange.apart else ""
        note = f" ({' then '.join(self.phases)})" if self.kind == "exchange" else ""
        return f"{self.kind}{groups}: {_sbp.text(source.nd_sbp)} -> {_sbp.text(target.nd_sbp)}{note}"
