"""`dist.explain(model, batch_size)`: puts the parts together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import keras

from keras_flow import sbp
from keras_flow.backends.active import backend
from keras_flow.current.models import own_variables
from keras_flow.current.variable_layout import VariableLayout, keras_layout
from keras_flow.errors import FlowError
from keras_flow.explainer import graph as graphs
from keras_flow.explainer import suggest, warn
from keras_flow.explainer.explanation import PASSES, Collective, Explanation, Memory, Repeated, VariableRow
from keras_flow.explainer.memory import Held, backward_peak
from keras_flow.explainer.optimizer import Slot, slots_of
from keras_flow.explainer.rules import is_leaf, rule_of
from keras_flow.explainer.step import Step
from keras_flow.layout import Layout, itemsize

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

_ESTIMATED = (
    "activations (what is kept for the backward pass) and the peak are estimates: an engine may compute anew what it "
    "could keep, and lay tensors in each other's place"
)


def explain(distribution: FlowDistribution, model: keras.Model, batch_size: int) -> Explanation:
    """What a training step of `model` holds, sends and repeats under `distribution`.

    Raises:
        FlowError: the model is not built, or `batch_size` is no number of rows.
    """
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise FlowError(f"explain was given batch_size={batch_size!r}; legal is a whole number of at least 1")
    capabilities = backend().capabilities
    graph = graphs.graph_of(model, batch_size, is_leaf)
    placed = _placed(distribution, model)
    layouts = {id(variable): one.layout for variable, one in placed}
    slots, notes = slots_of(distribution, model)
    step = Step(
        graph,
        {axis: distribution.placement.axis_size(axis) for axis in distribution.placement.axis_names},
        capabilities.traffic,
        capabilities.memory,
        lambda variable: layouts[id(variable)],
        slots=len(slots) // max(1, len(model.trainable_variables)),
    )
    plan = distribution.batch_plan(batch_size)
    if plan.divides or capabilities.uneven_batches == "parallel":
        rows = {axis: 0 for axis in distribution.batch_axes if step.axes[axis] > 1}
    else:
        rows = {}
    for key in graph.inputs:
        step.splits[key] = rows if graph.tensors[key].shape else {}
    held = []
    for call in list(graph.calls):
        held.append(_explained(step, call))
        _constrain(step, call, distribution)
    held.append(_outputs(step, distribution, model, bool(rows)))
    step.settle_input_sums()
    result = Explanation(
        model=model.name,
        engine=backend().name,
        placement=dict(step.axes),
        batch_size=batch_size,
        variables=[_row(variable, one) for variable, one in placed],
        memory=_memory(distribution, placed, slots, step, held),
        collectives=_ordered(step.collectives, capabilities.traffic.joins_gradients),
        repeated=_repeated(step),
        warnings=[],
        notes=[*graph.notes, *notes, _ESTIMATED],
    )
    pairs = suggest.pairs(step)
    return replace(result, warnings=warn.warnings(step, distribution, model, plan, placed), suggested_rules=pairs)


def _explained(step: Step, call: graphs.Call) -> Held:
    """Apply the rule of a call's layer; returns what the call holds."""
    before, step.needed = step.activations, 0
    rule = rule_of(call.layer)
    assert rule is not None  # the graph was walked down to such layers
    rule(step, call)
    ends = sum(step.local(key) for key in (*call.inputs, *call.outputs) if key in step.trained)
    variables = getattr(call.layer, "trainable_variables", ())
    return Held(step.activations - before, ends, step.needed, sum(map(step.weight, variables)))


def _placed(distribution: FlowDistribution, model: keras.Model) -> list[tuple[keras.Variable, VariableLayout]]:
    """Each variable of the model and its layout: the one that it has, else the one that it would get."""
    owners = {id(variable): layer for layer in model._flatten_layers() for variable in own_variables(layer)}
    found = []
    for variable in model.variables:
        layout = keras_layout(variable)
        if layout is None or layout.distribution is not distribution:
            layout = distribution.layout_for(variable.path, tuple(variable.shape), owners.get(id(variable)))
        found.append((variable, layout.given))
    return found


def _row(variable: keras.Variable, placed: VariableLayout) -> VariableRow:
    note = "; ".join(part for part in (placed.note, "gathered where it is used" if placed.gathered else "") if part)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return VariableRow(
        variable.path,
        tuple(variable.shape),
        dtype,
        sbp.text(placed.layout.nd_sbp),
        placed.source,
        note,
        _bytes(placed.layout, dtype),
    )


def _bytes(layout: Layout, dtype: str) -> int:
    """Bytes on a rank. Variables are split evenly (see `resolve`), so one rank's are those of all."""
    return math.prod(layout.local_shape(layout.placement.ranks[0])) * itemsize(dtype)


def _memory(
    distribution: FlowDistribution,
    placed: Sequence[tuple[keras.Variable, VariableLayout]],
    slots: Sequence[Slot],
    step: Step,
    calls: Sequence[Held],
) -> dict[int, Memory]:
    held = [(_bytes(one.layout, variable.dtype), variable.trainable) for variable, one in placed]
    weights = sum(size for size, _ in held)
    of_slots = sum(_bytes(one.layout, dtype) for one, dtype in slots)
    gradients = sum(size for size, trainable in held if trainable)
    summed = [one.bytes for one in step.collectives if one.phase == "gradients" and one.kind == "all_reduce"]
    besides = step.memory
    at_a_time = gradients if besides.update_block_bytes is None else min(gradients, besides.update_block_bytes)
    update = sum(summed) * besides.reduces_out_of_place + besides.update_tensors * at_a_time
    peak = weights + of_slots + max(backward_peak(calls), gradients + update)
    one_rank = Memory(weights, of_slots, gradients, step.activations, peak)
    return dict.fromkeys(distribution.placement.ranks, one_rank)


def _constrain(step: Step, call: graphs.Call, distribution: FlowDistribution) -> None:
    """Lay outputs as a rule on activations says."""
    wanted = distribution.get_tensor_layout(f"{call.path}/output")
    if wanted is None:
        return
    parts = zip(step.axes, wanted.nd_sbp, strict=True)
    asked = {axis: part.dim for axis, part in parts if isinstance(part, sbp.Split)}
    for key in call.outputs:
        for axis in step.axes:
            before, after = step.splits[key].get(axis), asked.get(axis)
            if before == after or (after is not None and after >= len(step.shape(key))):
                continue
            whole = step.local(key, without=axis)
            why = "activations ask for another layout"
            rest = {name: dim for name, dim in step.splits[key].items() if name != axis}
            step.splits[key] = rest if after is None else {**rest, axis: after}
            if after is None:
                step.send("all_gather", (axis,), whole, "forward", call.path, "output", why)
            elif before is None:
                step.send("all_gather", (axis,), whole, "backward", call.path, "output gradient", why)
            else:
                size = step.local(key)
                step.send("all_to_all", (axis,), size, "forward", call.path, "output", why)
                step.send("all_to_all", (axis,), size, "backward", call.path, "output gradient", why)


def _outputs(step: Step, distribution: FlowDistribution, model: keras.Model, rows_split: bool) -> Held:
    """What losses and metrics need and hold."""
    view = "mirrored" if distribution.mirrored_view else "consistent"
    measured = bool(getattr(model, "compiled", False)) and bool(getattr(model, "_compile_metrics", None))
    for key in step.graph.outputs:
        for axis, dim in step.splits[key].items():
            if dim != 0:
                size = step.local(key, without=axis)
                step.send("all_gather", (axis,), size, "outputs", model.name, "output", "losses need rows whole")
                step.splits[key] = {name: at for name, at in step.splits[key].items() if name != axis}
    axes = tuple(axis for axis in distribution.batch_axes if rows_split and step.axes[axis] > 1)
    held = sum(step.local(key) for key in step.graph.outputs)
    if not axes:
        return Held(step.memory.loss_tensors * held)
    gathers = view in step.traffic.gathers_outputs and (view == "mirrored" or measured)
    for key in step.graph.outputs if gathers else ():
        size = step.local(key, {})
        step.send(
            "all_gather", axes, size, "outputs", model.name, "output", "losses and metrics are computed on all rows"
        )
    if gathers and view == "consistent":
        rows = step.graph.batch
        step.send("all_gather", axes, 8 * rows, "outputs", model.name, "targets", "metrics are computed on all rows")
    if not (gathers and view == "mirrored"):
        why = "each rank has the sum over its rows"
        step.send("all_reduce", axes, 4 + 4 * measured, "outputs", model.name, "loss and metrics", why)
    if gathers and view == "mirrored":  # the loss is computed on all rows
        whole = sum(step.local(key, {}) for key in step.graph.outputs)
        return Held((step.memory.loss_tensors + 1) * whole)
    return Held(step.memory.loss_tensors * held)


def _ordered(collectives: Sequence[Collective], joined: bool) -> list[Collective]:
    """By pass; gradients that travel together are one."""
    if joined:
        collectives = _joined(collectives)
    return sorted(collectives, key=lambda one: PASSES.index(one.phase))


def _joined(collectives: Sequence[Collective]) -> list[Collective]:
    groups: dict[tuple[str, ...], list[Collective]] = {}
    rest = []
    for one in collectives:
        together = one.phase == "gradients" and one.kind == "all_reduce"
        (groups.setdefault(one.axes, []) if together else rest).append(one)
    for axes, parts in groups.items():
        names = [f"{one.path}: {one.tensor.removesuffix(' gradient')}" for one in parts]
        rest.append(
            Collective(
                "all_reduce",
                axes,
                parts[0].ranks,
                sum(one.bytes for one in parts),
                sum(one.received for one in parts),
                "gradients",
                ", ".join(dict.fromkeys(one.path for one in parts)),
                f"gradients of {len(names)} variables, together",
                parts[0].why,
            )
        )
    return rest


def _repeated(step: Step) -> list[Repeated]:
    """Layers with weights that all ranks of an axis compute alike: neither input, weights nor output is split."""
    found = []
    for call in step.graph.calls:
        variables = [v for v in getattr(call.layer, "trainable_variables", ()) if len(v.shape) > 1]
        if not variables:
            continue
        parameters = sum(step.piece(tuple(v.shape), {}) for v in variables)
        for axis, ranks in step.axes.items():
            keys = (*call.inputs, *call.outputs)
            split = any(axis in step.splits.get(key, {}) for key in keys)
            if ranks > 1 and not split and not any(axis in step.variable(v) for v in variables):
                found.append(Repeated(call.path, axis, ranks, parameters))
    return found
