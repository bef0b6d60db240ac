"""`dist.explain(model, batch_size)`: walks the calls of a model and adds up what one training step costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import keras

from keras_flow import sbp
from keras_flow.backends.active import backend
from keras_flow.backends.row_wise import row_sums
from keras_flow.current.batch import rows_asked
from keras_flow.current.models import owners_of
from keras_flow.current.variable_layout import KerasLayout, VariableLayout, keras_layout
from keras_flow.distributions.dry_run import dry_run
from keras_flow.errors import FlowError
from keras_flow.explainer import backward_memory, suggest, warn
from keras_flow.explainer import graph as graphs
from keras_flow.explainer.backward_memory import CallMemory, backward_peak
from keras_flow.explainer.contraction import UPDATES_A_PART
from keras_flow.explainer.explanation import (
    PASSES,
    CallRow,
    Collective,
    Explanation,
    Memory,
    Repeated,
    TensorRow,
    VariableRow,
)
from keras_flow.explainer.layer_costs import cost_function, is_leaf
from keras_flow.explainer.step_cost import StepCost
from keras_flow.layout import Layout, itemsize

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

_HELD_SPLIT = "each rank holds a part (zero=3)"
#: variables that are added: no gradient is computed with them
_ADDED = ("bias", "beta")
_AGAIN = (
    "remat: what the layers that are computed again send is counted once; their second run may send it again. kf.trace "
    "measures what is sent"
)

#: the note of a model without an optimizer
NOT_COMPILED = "the model is not compiled: no optimizer's slots are counted. Call model.compile in build_model()"
#: layout and dtype of a variable of the optimizer
Slot: TypeAlias = tuple[VariableLayout, str]


def explain(distribution: FlowDistribution, model: keras.Model, batch_size: int) -> Explanation:
    """What a training step of `model` holds, sends and repeats under `distribution`.

    Raises:
        FlowError: the model is not built, or `batch_size` is no number of rows.
    """
    batch_size = checked_rows(batch_size)
    capabilities = backend().capabilities
    graph = graphs.graph_of(model, batch_size, is_leaf)
    placed = layouts_of(distribution, model)
    gathers = distribution.gathers_weights
    # as they are computed with, which is how they are held unless they are gathered for that
    layouts = {id(variable): (given.used if gathers else None) or given.layout for variable, given in placed}
    of_slots = {id(each): _slot_layout(distribution, given) for each, given in placed if each.trainable or gathers}
    slots, notes = _slots_of(distribution, model)
    step = StepCost(
        graph,
        {axis: distribution.placement.axis_size(axis) for axis in distribution.placement.axis_names},
        capabilities.traffic,
        capabilities.memory,
        lambda variable: layouts[id(variable)],
        lambda variable: of_slots.get(id(variable), layouts[id(variable)]),
        cuts_gradients=distribution.zero_stage > 1 and capabilities.memory.cuts_gradients,
        gathers_weights=gathers,
        uses_of_gradient=_uses_of_gradient(model),
        batch_statistics=distribution.batch_statistics,
    )
    plan = distribution.batch_plan(batch_size)
    if capabilities.keeps_split(plan, distribution.mirrored_view):
        rows = {axis: 0 for axis in distribution.batch_axes if step.axes[axis] > 1}
    else:
        rows = {}
    step.rows = tuple(rows)
    # a scalar input has no rows to split
    for key in graph.inputs:
        step.splits[key] = rows if graph.tensors[key].shape else {}
    memory_of_calls = []
    for call in list(graph.calls):
        memory_of_calls.append(explained(step, call))
        constrain(step, call, distribution)
    blocks = distribution.blocks_of(model)
    memory_of_calls = backward_memory.with_blocks(step, graph.calls, memory_of_calls, blocks)
    tensors = {key: TensorRow(spec.shape, _short(step, key)) for key, spec in graph.tensors.items()}
    memory_of_calls.append(_outputs(step, distribution, model, bool(rows)))
    step.settle_input_sums()
    if not gathers:
        _gather_updated(step, model)
    # advice needs the settled collectives, so it is added afterwards
    result = Explanation(
        model=model.name,
        engine=backend().name,
        placement=dict(step.axes),
        batch_size=batch_size,
        variables=[row_of(variable, given) for variable, given in placed],
        memory=_memory(distribution, placed, slots, step, memory_of_calls),
        collectives=_ordered(step.collectives, capabilities.traffic.joins_gradients),
        repeated=_repeated(step),
        warnings=[],
        notes=[*graph.notes, *notes, *([_AGAIN] if blocks else [])],
        calls=[CallRow(call.path, type(call.layer).__name__, call.inputs, call.outputs) for call in graph.calls],
        tensors=tensors,
        inputs=graph.inputs,
    )
    return replace(
        result,
        warnings=warn.warnings(step, distribution, model, plan, placed),
        suggested_rules=suggest.paired_rules(step),
        rules=suggest.own_rules(distribution),
    )


def checked_rows(batch_size: object) -> int:
    """The rows of a batch of this size.

    Raises:
        FlowError: it is no number of rows.
    """
    if rows := rows_asked(batch_size):
        return rows
    raise FlowError(f"explain was given batch_size={batch_size!r}; legal is a whole number of at least 1")


def _slot_layout(distribution: FlowDistribution, given: VariableLayout) -> Layout:
    return distribution.slot_layout(KerasLayout(given, distribution)).layout


def _gather_updated(step: StepCost, model: keras.Model) -> None:
    """Record the gathers of variables of which each rank has updated a part."""
    owners = owners_of(model)
    for variable in model.trainable_variables:
        axes, owner = step.part_axes(variable), owners.get(id(variable))
        path = variable.path.rpartition("/")[0] or (owner.name if owner is not None else model.name)
        step.send("all_gather", axes, step.weight(variable), "update", path, variable.name, UPDATES_A_PART)


def _gather_used(step: StepCost, call: graphs.LayerCall) -> None:
    """Record the gathers of a call's weights, of which each rank holds a part (`zero=3`), and the memory of whole ones.

    The gradient of an input is computed with the weight, so where the engine has not kept it, it is gathered again.
    """
    # torch's convolutions keep a copy in another order of memory
    keeps = not step.traffic.gathers_again or hasattr(call.layer, "kernel_size")
    again = not keeps and any(key in step.trained for key in call.inputs)
    for variable in getattr(call.layer, "variables", ()):
        axes, size = step.part_axes(variable), step.weight(variable)
        if not axes:
            continue
        step.send("all_gather", axes, size, "forward", call.path, variable.name, _HELD_SPLIT)
        if again and variable.name not in _ADDED:
            step.send("all_gather", axes, size, "backward", call.path, variable.name, _HELD_SPLIT)
        if keeps:
            step.activations += size
        if (
            step.traffic.gathers_again
        ):  # the gradient, as it is packed and as it arrives, and the weight that comes next
            step.workspace = max(step.workspace, 4 * size)


def explained(step: StepCost, call: graphs.LayerCall) -> CallMemory:
    """Add the cost of a call to the step, and return the memory that the call needs."""
    before, step.workspace = step.activations, 0
    add_cost = cost_function(call.layer)
    assert add_cost is not None  # graph_of stops at layers that have one
    add_cost(step, call)
    if step.gathers_weights:
        _gather_used(step, call)
    tensor_gradients = sum(step.local(key) for key in (*call.inputs, *call.outputs) if key in step.trained)
    variable_gradients = sum(step.gradient(each) for each in getattr(call.layer, "trainable_variables", ()))
    return CallMemory(step.activations - before, tensor_gradients, step.workspace, variable_gradients)


def _short(step: StepCost, key: int) -> str:
    """The layout of a tensor between calls, one sbp for each axis."""
    split = step.splits.get(key, {})
    return ",".join(f"S({split[axis]})" if axis in split else "B" for axis in step.axes)


def layouts_of(distribution: FlowDistribution, model: keras.Model) -> list[tuple[keras.Variable, VariableLayout]]:
    """Each variable of the model and its layout: the one that it has, otherwise the one that it would get."""
    owners = owners_of(model)
    layouts = []
    for variable in model.variables:
        layout = keras_layout(variable)
        if layout is None or layout.distribution is not distribution:
            layout = distribution.layout_for(
                variable.path, tuple(variable.shape), owners.get(id(variable)), variable.dtype
            )
        layouts.append((variable, layout.given))
    return layouts


def row_of(variable: keras.Variable, placed: VariableLayout) -> VariableRow:
    """The row of a variable."""
    note = "; ".join(part for part in (placed.note, "gathered where it is used" if placed.used else "") if part)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return VariableRow(
        variable.path,
        tuple(variable.shape),
        dtype,
        sbp.text(placed.layout.nd_sbp),
        placed.source,
        note,
        bytes_on_rank(placed.layout, dtype),
    )


def bytes_on_rank(layout: Layout, dtype: str) -> int:
    """Bytes on a rank. Variables are split evenly (see `resolve`), so one rank's are those of all."""
    return math.prod(layout.local_shape(layout.placement.ranks[0])) * itemsize(dtype)


def _memory(
    distribution: FlowDistribution,
    placed: Sequence[tuple[keras.Variable, VariableLayout]],
    slots: Sequence[Slot],
    step: StepCost,
    calls: Sequence[CallMemory],
) -> dict[int, Memory]:
    weights = sum(bytes_on_rank(given.layout, variable.dtype) for variable, given in placed)
    of_slots = sum(bytes_on_rank(given.layout, dtype) for given, dtype in slots)
    gradients = sum(step.gradient(variable) for variable, _ in placed if variable.trainable)
    summed = [
        collective.bytes
        for collective in step.collectives
        if collective.phase == "gradients" and collective.kind == "all_reduce"
    ]
    engine = step.memory
    # the peak is either in the backward pass or in the update, when activations are gone
    update = sum(summed) * engine.reduces_out_of_place + engine.update_tensors * gradients
    # what is gathered for its use is scattered one by one, in the workspace of its call
    in_buckets = sum(each.bytes for each in step.collectives if each.kind == "reduce_scatter")
    scattered = 0 if step.gathers_weights else min(in_buckets, engine.scattered_bytes)
    peak = weights + of_slots + max(backward_peak(calls), gradients + update + 2 * scattered)
    one_rank = Memory(weights, of_slots, gradients, step.activations, peak)
    return dict.fromkeys(distribution.placement.ranks, one_rank)


def _uses_of_gradient(model: keras.Model) -> int:
    """How often an update uses a gradient: twice where it makes two dense moments or directions of it (Keras 3.15)."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    # Adamax, Nadam and the like are counted by what they are derived from, or as one
    return 2 if isinstance(optimizer, keras.optimizers.Adam | keras.optimizers.Lion) else 1


def _slots_of(distribution: FlowDistribution, model: keras.Model) -> tuple[list[Slot], list[str]]:
    """The optimizer's variables that are no scalars, and notes where they cannot be counted.

    An optimizer that is not built yet is copied, and the copy built in a dry run: its slots get layouts, no values.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return [], [NOT_COMPILED]
    slots, notes = optimizer.variables, []
    if not optimizer.built:
        with dry_run(distribution.placement.size), distribution.scope():
            slots, notes = variables_of_copy(optimizer, model.trainable_variables)
    return [_slot(variable, distribution) for variable in slots if len(variable.shape)], notes


def variables_of_copy(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> tuple[Sequence[keras.Variable], list[str]]:
    """The variables of a copy of an optimizer that is built for some weights; none, and a note, where it cannot be."""
    try:
        copy = type(optimizer).from_config(optimizer.get_config())
        copy.build(variables)
    except Exception as error:
        return [], [f"slots are not counted: {type(optimizer).__name__} could not be copied ({error})"]
    return copy.variables, []


def _slot(variable: keras.Variable, distribution: FlowDistribution) -> Slot:
    layout = keras_layout(variable)
    whole = VariableLayout(Layout(distribution.placement, {}, tuple(variable.shape)), "default")
    return layout.given if layout else whole, keras.backend.standardize_dtype(variable.dtype)


def constrain(step: StepCost, call: graphs.LayerCall, distribution: Any) -> None:
    """Change the layout of a call's output where a rule for activations asks for another one, and record the cost."""
    rule = distribution.get_tensor_layout(f"{call.path}/output")
    if rule is None:
        return
    parts = zip(step.axes, rule.nd_sbp, strict=True)
    requested = {axis: part.dim for axis, part in parts if isinstance(part, sbp.Split)}
    for key in call.outputs:
        for axis in step.axes:
            before, after, dims = step.splits[key].get(axis), requested.get(axis), len(step.shape(key))
            if after is not None and after < 0:
                after += dims
            if before == after or (after is not None and after not in range(dims)):
                continue
            whole = step.local(key, without=axis)
            why = "activations ask for another layout"
            # one axis after the other, as the engines change layouts of activations
            rest = {name: dim for name, dim in step.splits[key].items() if name != axis}
            step.splits[key] = rest if after is None else {**rest, axis: after}
            if after is None:
                step.send("all_gather", (axis,), whole, "forward", call.path, "output", why)
            elif before is None:
                # forward a part is cut without communication, so its gradient is gathered
                step.send("all_gather", (axis,), whole, "backward", call.path, "output gradient", why)
            else:
                size = step.local(key)
                step.send("all_to_all", (axis,), size, "forward", call.path, "output", why)
                step.send("all_to_all", (axis,), size, "backward", call.path, "output gradient", why)


def _outputs(step: StepCost, distribution: FlowDistribution, model: keras.Model, rows_split: bool) -> CallMemory:
    """Record the collectives of losses and metrics, and return the memory that they need."""
    view = "mirrored" if distribution.mirrored_view else "consistent"
    measured = bool(getattr(model, "compiled", False)) and bool(getattr(model, "_compile_metrics", None))
    for key in step.graph.outputs:
        for axis, dim in step.splits[key].items():
            if dim != 0:
                size = step.local(key, without=axis)
                step.send("all_gather", (axis,), size, "outputs", model.name, "output", "losses need rows whole")
                step.splits[key] = {name: at for name, at in step.splits[key].items() if name != axis}
    axes = tuple(axis for axis in distribution.batch_axes if rows_split and step.axes[axis] > 1)
    outputs = sum(step.local(key) for key in step.graph.outputs)
    if not axes:
        return CallMemory(step.memory.loss_tensors * outputs)
    gathers = view in step.traffic.gathers_outputs and _mixes_rows(step, model, view)
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
        return CallMemory((step.memory.loss_tensors + 1) * whole)
    return CallMemory(step.memory.loss_tensors * outputs)


def _mixes_rows(step: StepCost, model: keras.Model, view: str) -> bool:
    """Whether a loss (in the mirrored view) or a metric needs all rows of the outputs."""
    rank = min((len(step.shape(key)) for key in step.graph.outputs), default=0)
    kinds = ("loss", "metric") if view == "mirrored" else ("metric",)
    return any(row_sums.of_compiled(model, kind, rank) for kind in kinds)


def _ordered(collectives: Sequence[Collective], joined: bool) -> list[Collective]:
    """The collectives in the order of passes; where gradients travel `joined`, those of one kind count as one."""
    if joined:
        collectives = _joined(collectives)
    return sorted(collectives, key=lambda collective: PASSES.index(collective.phase))


def _joined(collectives: Sequence[Collective]) -> list[Collective]:
    groups: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    rest = []
    for collective in collectives:
        # not what goes to the layout of one variable that is used in another one
        is_sum = collective.phase == "gradients" and collective.kind == "all_reduce"
        together = is_sum or collective.why == UPDATES_A_PART
        key = collective.phase, collective.kind, collective.axes
        (groups.setdefault(key, []) if together else rest).append(collective)
    for (phase, kind, axes), parts in groups.items():
        names = [f"{collective.path}: {collective.tensor.removesuffix(' gradient')}" for collective in parts]
        rest.append(
            Collective(
                kind,
                axes,
                parts[0].ranks,
                sum(collective.bytes for collective in parts),
                sum(collective.received for collective in parts),
                phase,
                ", ".join(dict.fromkeys(collective.path for collective in parts)),
                f"{'gradients' if phase == 'gradients' else 'new values'} of {len(names)} variables, together",
                parts[0].why,
            )
        )
    return rest


def _repeated(step: StepCost) -> list[Repeated]:
    """Layers with weights that all ranks of an axis compute alike: neither input, weights nor output is split."""
    repeated = []
    for call in step.graph.calls:
        variables = [v for v in getattr(call.layer, "trainable_variables", ()) if len(v.shape) > 1]
        if not variables or step.graph.is_without_rows(call):
            continue
        parameters = sum(step.piece(tuple(v.shape), {}) for v in variables)
        for axis, ranks in step.axes.items():
            keys = (*call.inputs, *call.outputs)
            split = any(axis in step.splits.get(key, {}) for key in keys)
            if ranks > 1 and not split and not any(axis in step.variable(v) for v in variables):
                repeated.append(Repeated(call.path, axis, ranks, parameters))
    return repeated
