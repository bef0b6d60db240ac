"""`kf.explain`: what an operator, or a function and its gradients, would choose and send, from layouts alone.

It is a dry run (`dry_run.py`) whose record is printed: for each operator the signature with its cost, the boxing of its
inputs, and the signatures that cost more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keras_flow.boxing.spec import BoxingPlan
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.sbp import text
from keras_flow.signatures.choice import Option
from keras_flow.tensors import gradients, tape
from keras_flow.tensors.dry_run import OperatorCost, OperatorRecorder, recorded_by
from keras_flow.tensors.global_tensor import GlobalTensor
from keras_flow.tensors.ops import Operator


@dataclass(frozen=True)
class GradientLine:
    """The gradient of a float input: its layout out of the operators, and the boxing to the one that it returns in.

    Attributes:
        unreduced: its layout as the operators give it; None: the result does not depend on the input.
        returned: that of the input, with B for P.
        plan: the boxing plan from the one to the other; None where they are the same.
    """

    unreduced: Layout | None
    returned: Layout
    plan: BoxingPlan | None = None

    def __str__(self) -> str:
        how = f"comes as ({text(self.unreduced.nd_sbp)})" if self.unreduced else "is zeros"
        received = self.plan.total_bytes if self.plan else 0
        return f"of {list(self.returned.shape)} {how}, is laid as ({text(self.returned.nd_sbp)}), {received} bytes"


@dataclass(frozen=True)
class OperatorExplanation:
    """An account of an operator, or a function and its gradients, on given layouts; nothing was computed or sent.

    Attributes:
        name: the name of the operator or function.
        lines: the operators that would run; a function or a decomposition has several.
        outputs: the results, without values.
        gradients: those of the float inputs, in their order, if the cotangent of a result that is P is B.
        way_back: boxing of cotangents between operators.
    """

    name: str
    lines: tuple[OperatorCost, ...]
    outputs: tuple[GlobalTensor, ...]
    gradients: tuple[GradientLine, ...] = ()
    way_back: tuple[BoxingPlan, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that all ranks together receive for the results; gradients are apart."""
        return sum(plan.total_bytes for line in self.lines for plan in line.plans)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that all ranks together receive for the gradients."""
        at_leaves = [line.plan for line in self.gradients if line.plan is not None]
        return sum(plan.total_bytes for plan in (*self.way_back, *at_leaves))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that boxing has on a rank at once; the first 64 ranks are asked, as others are alike."""
        return max(
            (plan.peak_bytes(rank) for line in self.lines for plan in line.plans for rank in plan.ranks[:64]), default=0
        )

    def __str__(self) -> str:
        out = ", ".join(f"({text(output.sbp)}) of {list(output.shape)}" for output in self.outputs)
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


def explain(program: object, *args: object, **kwargs: object) -> OperatorExplanation:
    """Explain what `program(*args, **kwargs)` would do, without computing or sending anything.

    Args:
        program: an operator of `kf.ops`, or a function that `kf.value_and_grad` returned.
        *args: as for the program.
        **kwargs: as for the program.

    Returns:
        The chosen signatures and the rejected ones, boxing steps, bytes, peak memory and gradients.

    Raises:
        FlowError: `program` is neither, or it needs the values of tensors, of which only layouts are known here.

    Example:
        >>> import keras_flow as kf
        >>> mesh = kf.Placement([0, 1])
        >>> x, w = (kf.ones(4, 4, placement=mesh, sbp=sbp) for sbp in ("S(1)", "S(0)"))
        >>> print(kf.explain(kf.ops.matmul, x, w).outputs[0].sbp)  # nothing is sent
        (P,)
    """
    if not isinstance(program, (Operator, gradients.ValueAndGrad)):
        raise FlowError(
            "kf.explain explains operators of kf.ops, kf.ops.matmul for example, and what kf.value_and_grad returns; "
            f"got {program!r}"
        )
    forward, backward = OperatorRecorder(), OperatorRecorder()
    with recorded_by(forward):
        if isinstance(program, Operator):
            # one tensor given twice has two gradients, which are told apart by identity
            args, kwargs = gradients.distinct((args, kwargs))
            leaves = gradients.floats_of((args, kwargs))
            result, records = tape.record(lambda: program(*args, **kwargs), leaves)
            returned = result
        else:
            chosen, result, records = program.record(args, kwargs)
            leaves = gradients.floats_of(chosen)
            returned = gradients.value_as_read(result)
    with recorded_by(backward):
        # of any value: the layouts of gradients do not depend on it
        cotangents = [(output, gradients.cotangent_of_ones(output)) for output in gradients.floats_of(result)]
        by_id = gradients.walk_back(records, cotangents) if cotangents else {}
    lines = [_gradient_line(leaf, by_id) for leaf in leaves] if cotangents else []
    outputs = tuple(gradients.tensors_of(returned))
    return OperatorExplanation(str(program), tuple(forward.operators), outputs, tuple(lines), tuple(backward.plans))


def _gradient_line(leaf: GlobalTensor, by_id: Mapping[int, GlobalTensor]) -> GradientLine:
    recorder = OperatorRecorder()
    with recorded_by(recorder):
        returned = gradients.at_leaf(leaf, by_id).layout
    if id(leaf) not in by_id:
        return GradientLine(None, returned)
    return GradientLine(by_id[id(leaf)].layout, returned, recorder.plans[0] if recorder.plans else None)
