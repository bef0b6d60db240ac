"""Dry runs: a program of operators runs on layouts alone, and what it would choose and send is recorded.

`kf.explain` is a dry run whose record is printed. Dispatch compares an operator's decomposition with the operator
itself by the cost of two dry runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

from keras_flow.boxing.spec import BoxingPlan
from keras_flow.scoped import setting
from keras_flow.signatures import Choice, OperatorCall
from keras_flow.tensors import tape


@dataclass(frozen=True)
class OperatorCost:
    """One operator of a dry run: the signature it chose, the rejected ones, and the boxing of its inputs."""

    call: OperatorCall
    choice: Choice
    plans: tuple[BoxingPlan, ...] = ()


@dataclass
class OperatorRecorder:
    """A record of a dry run.

    Attributes:
        operators: in the order in which they were called.
        plans: all boxing, both of inputs and by `x.to_global`.
        largest_elements: elements of inputs and outputs on the fullest rank, of the operator that has most.
    """

    operators: list[OperatorCost] = field(default_factory=list)
    plans: list[BoxingPlan] = field(default_factory=list)
    largest_elements: int = 0
    _before_first: list[BoxingPlan] = field(default_factory=list)

    def record_choice(self, call: OperatorCall, choice: Choice) -> None:
        """An operator chose its signature; the boxing of its inputs follows."""
        self.largest_elements = max(self.largest_elements, choice.chosen.elements)
        self.operators.append(OperatorCost(call, choice, tuple(self._before_first)))
        self._before_first.clear()

    def record_boxing(self, plan: BoxingPlan) -> None:
        """A tensor changed its layout; the last operator pays, or the first, where none was called yet."""
        self.plans.append(plan)
        if self.operators:
            last = self.operators[-1]
            self.operators[-1] = OperatorCost(last.call, last.choice, (*last.plans, plan))
        else:
            self._before_first.append(plan)


_recorder: ContextVar[OperatorRecorder | None] = ContextVar("recorder", default=None)


def recorded_by(records: OperatorRecorder) -> AbstractContextManager[None]:
    """Inside, operators on global tensors compute and send nothing, and tell this recorder what they would."""
    return setting(_recorder, records)


def recorder() -> OperatorRecorder | None:
    """The recorder of the dry run that is on; None where tensors are computed."""
    return _recorder.get()


def is_on() -> bool:
    """Whether tensors have layouts and no values."""
    return _recorder.get() is not None


def cost_of(program: Callable[[], object]) -> tuple[int, int]:
    """The cost of a program on global tensors, by a dry run; smaller is better.

    Returns:
        Bytes that all ranks together receive, then the most elements that one of its operators has on a rank.
    """
    costs = OperatorRecorder()
    with recorded_by(costs), tape.paused():
        program()
    return sum(plan.total_bytes for plan in costs.plans), costs.largest_elements
