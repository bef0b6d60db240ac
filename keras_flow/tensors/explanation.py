"""What an operator would do: signatures and boxing, from layouts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_flow.boxing.spec import BoxingPlan
from keras_flow.errors import FlowError
from keras_flow.sbp import text
from keras_flow.signatures import Call, Choice
from keras_flow.signatures.choice import Option
from keras_flow.tensors.global_tensor import GlobalTensor, watched


@dataclass(frozen=True)
class Line:
    """One operator: its signature, those rejected, and the boxing of its inputs."""

    call: Call
    choice: Choice
    plans: tuple[BoxingPlan, ...] = ()


@dataclass(frozen=True)
class OperatorExplanation:
    """What an operator does on given layouts; nothing was computed or sent.

    Attributes:
        name: the operator.
        lines: the operators that it is made of, one where it runs on shards as it is.
        outputs: layouts of the results.
    """

    name: str
    lines: tuple[Line, ...]
    outputs: tuple[GlobalTensor, ...]

    @property
    def bytes(self) -> int:
        """Bytes received by all ranks together."""
        return sum(plan.total_bytes for line in self.lines for plan in line.plans)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that boxing takes on a rank at once."""
        return max(
            (plan.peak_bytes(rank) for line in self.lines for plan in line.plans for rank in plan.ranks[:64]), default=0
        )

    def __str__(self) -> str:
        out = ", ".join(f"({text(one.sbp)}) of {list(one.shape)}" for one in self.outputs)
        head = (
            f"kf.ops.{self.name}: {self.bytes} bytes received by all ranks, boxing peak {self.peak_bytes} bytes a rank"
        )
        rows = [head, f"result: {out}"]
        for line in self.lines:
            shapes = " ".join(str(list(shape)) for shape in line.call.inputs)
            rows.append(f"  {line.call.name} {shapes}: {_priced(line.choice.chosen)}")
            for plan in line.plans:
                rows += [f"    {part}" for part in str(plan.explain()).splitlines()]
            rows += [f"    rejected: {_priced(option)}" for option in line.choice.rejected]
        return "\n".join(rows)


def _priced(option: Option) -> str:
    owed = f", {option.owed} bytes owed for the sum" if option.owed else ""
    return f"{option}, {option.bytes} bytes{owed}"


@dataclass
class _Watcher:
    """Notes choices and plans."""

    bytes: int = 0
    lines: list[Line] = field(default_factory=list)
    before: list[BoxingPlan] = field(default_factory=list)

    def chosen(self, call: Call, choice: Choice) -> None:
        self.lines.append(Line(call, choice, tuple(self.before)))
        self.before.clear()

    def relaid(self, plan: BoxingPlan) -> None:
        self.bytes += plan.total_bytes
        if self.lines:
            last = self.lines[-1]
            self.lines[-1] = Line(last.call, last.choice, (*last.plans, plan))
        else:
            self.before.append(plan)


def explain(operator: Any, *args: Any, **kwargs: Any) -> OperatorExplanation:
    """What `operator(*args, **kwargs)` would do: its signature, the rejected ones, steps, bytes and peak memory.

    Args:
        operator: of `kf.ops`.
        *args: as for the operator.
        **kwargs: as for the operator.

    Raises:
        FlowError: it is no operator of `kf.ops`.
    """
    from keras import tree

    from keras_flow.tensors.ops import Operator

    if not isinstance(operator, Operator):
        raise FlowError(f"kf.explain explains operators of kf.ops, kf.ops.matmul for example; got {operator!r}")
    watcher = _Watcher()
    with watched(watcher):
        found = operator(*args, **kwargs)
    outputs = tuple(leaf for leaf in tree.flatten(found) if isinstance(leaf, GlobalTensor))
    return OperatorExplanation(operator.name, tuple(watcher.lines), outputs)


def bytes_of(program: Callable[[], Any]) -> int:
    """Bytes that all ranks together receive in operators on global tensors, from layouts alone."""
    watcher = _Watcher()
    with watched(watcher):
        program()
    return watcher.bytes
