"""What an operator would do: signatures and boxing, from layouts alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_flow.boxing.spec import BoxingPlan
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
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
class GradientLine:
    """How the gradient of a float input comes out of the operators, and how it is laid at the leaf.

    Attributes:
        came: its layout where nothing is reduced yet; None: the result does not depend on the input.
        laid: that of the input, but B for P.
        plan: the reduction; None where the gradient lies so already.
    """

    came: Layout | None
    laid: Layout
    plan: BoxingPlan | None = None

    def __str__(self) -> str:
        how = f"comes as ({text(self.came.nd_sbp)})" if self.came else "is zeros"
        received = self.plan.total_bytes if self.plan else 0
        return f"of {list(self.laid.shape)} {how}, is laid as ({text(self.laid.nd_sbp)}), {received} bytes"


@dataclass(frozen=True)
class OperatorExplanation:
    """What an operator, or a function and its gradients, does on given layouts; nothing was computed or sent.

    Attributes:
        name: the operator.
        lines: the operators that it is made of, one where it runs on shards as it is.
        outputs: layouts of the results.
        gradients: of the float inputs, in their order, where the gradient of a result lies as the result, but B for P.
        way_back: boxing of the gradients on their way from the results to the inputs.
    """

    name: str
    lines: tuple[Line, ...]
    outputs: tuple[GlobalTensor, ...]
    gradients: tuple[GradientLine, ...] = ()
    way_back: tuple[BoxingPlan, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes received by all ranks together, without the gradients'."""
        return sum(plan.total_bytes for line in self.lines for plan in line.plans)

    @property
    def gradient_bytes(self) -> int:
        """Bytes received by all ranks together for the gradients."""
        at_leaves = [line.plan for line in self.gradients if line.plan is not None]
        return sum(plan.total_bytes for plan in (*self.way_back, *at_leaves))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that boxing takes on a rank at once."""
        return max(
            (plan.peak_bytes(rank) for line in self.lines for plan in line.plans for rank in plan.ranks[:64]), default=0
        )

    def __str__(self) -> str:
        out = ", ".join(f"({text(one.sbp)}) of {list(one.shape)}" for one in self.outputs)
        head = f"{self.name}: {self.bytes} bytes received by all ranks, boxing peak {self.peak_bytes} bytes a rank"
        rows = [head, f"result: {out}"]
        for line in self.lines:
            shapes = " ".join(str(list(shape)) for shape in line.call.inputs)
            rows.append(f"  {line.call.name} {shapes}: {_priced(line.choice.chosen)}")
            for plan in line.plans:
                rows += [f"    {part}" for part in str(plan.explain()).splitlines()]
            rows += [f"    rejected: {_priced(option)}" for option in line.choice.rejected]
        if self.gradients:
            rows.append(f"gradients: {self.gradient_bytes} bytes received by all ranks")
            rows += [
                f"  on the way back: ({text(plan.source.nd_sbp)}) -> ({text(plan.target.nd_sbp)}) of "
                f"{list(plan.source.shape)}, {plan.total_bytes} bytes"
                for plan in self.way_back
                if plan.total_bytes
            ]
            rows += [f"  {line}" for line in self.gradients]
        return "\n".join(rows)


def _priced(option: Option) -> str:
    owed = f", {option.owed} bytes owed for the sum" if option.owed else ""
    return f"{option}, {option.bytes} bytes{owed}"


@dataclass
class _Watcher:
    """Notes choices and plans."""

    held: int = 0
    lines: list[Line] = field(default_factory=list)
    before: list[BoxingPlan] = field(default_factory=list)
    plans: list[BoxingPlan] = field(default_factory=list)

    def chosen(self, call: Call, choice: Choice) -> None:
        self.held = max(self.held, choice.chosen.elements)
        self.lines.append(Line(call, choice, tuple(self.before)))
        self.before.clear()

    def relaid(self, plan: BoxingPlan) -> None:
        self.plans.append(plan)
        if self.lines:
            last = self.lines[-1]
            self.lines[-1] = Line(last.call, last.choice, (*last.plans, plan))
        else:
            self.before.append(plan)


def explain(program: Any, *args: Any, **kwargs: Any) -> OperatorExplanation:
    """What `program(*args, **kwargs)` would do: signatures, the rejected ones, steps, bytes, peak memory, gradients.

    Args:
        program: an operator of `kf.ops`, or a function that `kf.value_and_grad` returned.
        *args: as for the program.
        **kwargs: as for the program.

    Raises:
        FlowError: it is neither; it needs values of tensors, of which only layouts are known here.
    """
    from keras_flow.tensors import gradients
    from keras_flow.tensors.ops import Operator

    if not isinstance(program, (Operator, gradients.ValueAndGrad)):
        raise FlowError(
            "kf.explain explains operators of kf.ops, kf.ops.matmul for example, and what kf.value_and_grad returns; "
            f"got {program!r}"
        )
    there, back = _Watcher(), _Watcher()
    with watched(there):
        if isinstance(program, Operator):
            args, kwargs = gradients.fresh((args, kwargs))
            leaves = gradients.floats_of((args, kwargs))
            found, tape = gradients.record(lambda: program(*args, **kwargs), leaves)
        else:
            chosen, found, tape = program.recorded(args, kwargs)
            leaves = gradients.floats_of(chosen)
    with watched(back):
        seeds = [(result, gradients.seed_of(result)) for result in gradients.floats_of(found)]
        came = gradients.back(tape, seeds) if seeds else {}
    lines = [_gradient_line(leaf, came) for leaf in leaves] if seeds else []
    outputs = tuple(gradients.tensors_of(found))
    return OperatorExplanation(str(program), tuple(there.lines), outputs, tuple(lines), tuple(back.plans))


def _gradient_line(leaf: GlobalTensor, came: Mapping[int, GlobalTensor]) -> GradientLine:
    from keras_flow.tensors import gradients

    watcher = _Watcher()
    with watched(watcher):
        laid = gradients.at_leaf(leaf, came).layout
    if id(leaf) not in came:
        return GradientLine(None, laid)
    return GradientLine(came[id(leaf)].layout, laid, watcher.plans[0] if watcher.plans else None)


def cost_of(program: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that all ranks together receive in operators on global tensors, and the most elements that one of these
    has on a rank; from layouts alone."""
    from keras_flow.tensors import gradients

    watcher = _Watcher()
    with watched(watcher), gradients.untaped():
        program()
    return sum(plan.total_bytes for plan in watcher.plans), watcher.held
