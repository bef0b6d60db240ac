"""What a step of a pipeline holds and sends: each stage's share, and a rank's memory by its schedule.

A rank holds what a stage's forward pass keeps, for each micro-batch from F to the end of its backward pass. In
`one_f_one_b` with two stages and four micro-batches rank 0 holds two at most, and rank 1 one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import keras

from keras_flow.backends.active import backend
from keras_flow.current.variable_layout import VariableLayout
from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.distributions.dry_run import dry_run
from keras_flow.errors import FlowError
from keras_flow.explainer import explain as whole
from keras_flow.explainer import graph as graphs
from keras_flow.explainer.backward_memory import CallMemory, backward_peak, with_blocks
from keras_flow.explainer.explanation import Collective, Explanation, Memory, StageRow
from keras_flow.explainer.graph import LayerCall
from keras_flow.explainer.layer_costs import is_leaf
from keras_flow.explainer.step_cost import StepCost, ring
from keras_flow.layout import Layout, itemsize
from keras_flow.pipelines import asked_schedule, cutting
from keras_flow.pipelines.graph import CallGraph
from keras_flow.pipelines.staged_model import StagedModel
from keras_flow.pipelines.stages import Stage
from keras_flow.schedules import Schedule
from keras_flow.schedules.action import BACKWARD, FORWARD, INPUTS, WEIGHTS

_IDLE = (
    "idle time is computed from the multiplications of each stage, a backward pass as two forward passes. kf.trace "
    "measures it"
)


@dataclass(frozen=True)
class HeldByStage:
    """Bytes of one stage for a micro-batch on one rank: kept until its backward pass, and what that needs besides."""

    kept: int
    besides: int


@dataclass(frozen=True)
class StagesOfStep:
    """What a training step of a model in stages has, in whatever order ranks compute.

    Attributes:
        stages: the model's.
        placed: each variable, and its layout.
        layouts: of variables, by their `id`.
        held: what a micro-batch keeps of each stage.
        within: the collectives of a micro-batch within stages.
        operations: of each stage's forward pass.
        slots: bytes of the optimizer's slots of each stage, on a rank.
        outputs: bytes of the model's outputs for all rows.
        notes: what could not be counted.
    """

    stages: Sequence[Stage]
    placed: Sequence[tuple[keras.Variable, VariableLayout]]
    layouts: Mapping[int, Layout]
    held: Sequence[HeldByStage]
    within: Sequence[Collective]
    operations: Sequence[float]
    slots: Sequence[int]
    outputs: int
    notes: Sequence[str]


def explain_pipeline(
    distribution: FlowDistribution, pipeline: StagedModel, batch_size: int, pipe_axis: str
) -> Explanation:
    """What a training step of a model in stages holds and sends.

    Args:
        distribution: it has laid the variables.
        pipeline: the model in stages.
        batch_size: rows of a batch.
        pipe_axis: the axis along which the stages are.

    Raises:
        FlowError: `batch_size` is no number of rows, or there are fewer rows than micro-batches.
    """
    batch_size = whole.checked_rows(batch_size)
    model, stages, schedule = pipeline.model, pipeline.stages, pipeline.schedule
    step = step_of(distribution, pipeline, batch_size)
    costs = asked_schedule.costs(step.operations)
    crossing = [_crossing(pipeline.graph, one, other, batch_size) for one, other in itertools.pairwise(stages)]
    crossing.append((0, 0))
    lane_axes = [*distribution.placement.axis_names]
    lane_axes = [name for name in lane_axes if name not in (pipe_axis, *_split_axes(stages))]
    return Explanation(
        model=model.name,
        engine=backend().name,
        placement={name: distribution.placement.axis_size(name) for name in distribution.placement.axis_names},
        batch_size=batch_size,
        variables=[
            replace(row, layout=f"{row.layout} on {_listed(given.layout.placement.ranks)}")
            for variable, given in step.placed
            for row in [whole.row_of(variable, given)]
        ],
        memory=memory_of(step, schedule),
        collectives=[
            *(_in_each(collective, schedule.microbatches) for collective in step.within),
            *_sums(lane_axes, stages, step.layouts),
        ],
        repeated=[],
        warnings=[],
        notes=[_IDLE, *step.notes],
        stages=[
            StageRow(
                stage.number,
                stage.all_ranks,
                len(stage.layers),
                next((layer.path or "" for layer in stage.layers), ""),
                sum(_size(variable) for variable in (*stage.trainable, *stage.state)),
                step.operations[stage.number] / sum(step.operations),
                step.held[stage.number].kept,
                *crossing[stage.number],
                len(stage.ranks),
            )
            for stage in stages
        ],
        schedule=repr(schedule),
        picture=repr(schedule.draw(costs)),
        idle=schedule.bubble(costs),
    )


def step_of(distribution: FlowDistribution, pipeline: StagedModel, batch_size: int) -> StagesOfStep:
    """What a training step has in the micro-batches of the pipeline's schedule.

    Args:
        distribution: it has laid the variables.
        pipeline: the model in stages.
        batch_size: rows of a batch.

    Raises:
        FlowError: `batch_size` is no number of rows, or there are fewer rows than micro-batches.
    """
    batch_size = whole.checked_rows(batch_size)
    model, calls, stages, schedule = pipeline.model, pipeline.graph, pipeline.stages, pipeline.schedule
    if batch_size < schedule.microbatches:
        raise FlowError(
            f"a batch of {batch_size} rows cannot be cut into {schedule.microbatches} micro-batches; take a larger "
            f"batch_size, or microbatches={batch_size}"
        )
    for stage in stages:
        stage.look_at_variables()
    lanes = len(stages[0].ranks)
    part = -(-batch_size // schedule.microbatches)
    rows = -(-part // lanes)  # of the largest micro-batch on one rank
    placed = whole.layouts_of(distribution, model)
    layouts = {id(each): given.layout for each, given in placed}
    held, within = _held(pipeline, distribution.blocks_of(model), rows, layouts)
    slots, notes = _slots(model, stages, layouts)
    return StagesOfStep(
        stages,
        placed,
        layouts,
        held,
        within,
        operations=[sum(cutting.operations(calls, call) for call in stage.calls) for stage in stages],
        slots=[-(-each // lanes) for each in slots] if distribution.zero_stage else slots,
        outputs=sum(_bytes(calls, key, batch_size) for key in stages[-1].sent),
        notes=notes,
    )


def _held(
    pipeline: StagedModel, blocks: Sequence[keras.Layer], rows: int, layouts: Mapping[int, Layout]
) -> tuple[list[HeldByStage], list[Collective]]:
    """What a rank keeps of one micro-batch for each stage, and what the micro-batch sends within its stages.

    A stage keeps what its layers' calls keep.

    Args:
        pipeline: the model in stages.
        blocks: layers that are computed again.
        rows: of the micro-batch.
        layouts: of variables, by their `id`.
    """
    calls, stages = pipeline.graph, pipeline.stages
    graph = graphs.graph_of(pipeline.model, rows, is_leaf)
    step = StepCost(
        graph,
        _split_axes(stages),
        backend().capabilities.traffic,
        backend().capabilities.memory,
        lambda variable: layouts[id(variable)],
        lambda variable: layouts[id(variable)],
    )
    for key in graph.inputs:
        step.splits[key] = {}
    stage_of: dict[int, int] = {}
    for stage in reversed(stages):  # a layer of several stages counts in the first
        stage_of.update((id(layer), stage.number) for layer in stage.inner_layers)
        stage_of.update((id(call.operation), stage.number) for call in stage.calls)
    of_stage: list[tuple[list[LayerCall], list[CallMemory]]] = [([], []) for _ in stages]
    number = 0
    for call in list(graph.calls):
        number = stage_of.get(id(call.layer), number)
        of_stage[number][0].append(call)
        of_stage[number][1].append(replace(whole.explained(step, call), variable_gradients=0))
        if stages[number].split:
            whole.constrain(step, call, stages[number].split[0])
    step.settle_input_sums()
    found = []
    for stage, in_stage in zip(stages, of_stage, strict=True):
        memory_of_calls = with_blocks(step, *in_stage, blocks)
        kept = sum(call.kept_for_backward for call in memory_of_calls)
        peak = backward_peak(memory_of_calls)
        # computed again, a stage keeps what it received
        received = sum(_bytes(calls, key, rows) for key in stage.received)
        found.append(HeldByStage(received, peak) if pipeline.remat else HeldByStage(kept, peak - kept))
    of_path = {call.path: number for number, (in_stage, _) in enumerate(of_stage) for call in in_stage}
    paths = [graphs.outer_of(each.path.split(", ")[0], of_path) for each in step.collectives]
    return found, [
        replace(each, stage=of_path.get(path, 0)) for each, path in zip(step.collectives, paths, strict=True)
    ]


def _split_axes(stages: Sequence[Stage]) -> dict[str, int]:
    """The axes over which the tensors of a stage are split, and the ranks along each."""
    placement = stages[0].split[0].placement if stages[0].split else None
    return {} if placement is None else {axis: placement.axis_size(axis) for axis in placement.axis_names}


def _in_each(collective: Collective, microbatches: int) -> Collective:
    """A collective of a micro-batch, as often as a step has it."""
    return replace(
        collective,
        bytes=collective.bytes * microbatches,
        received=collective.received * microbatches,
        why=f"{collective.why}, in each of {microbatches} micro-batches",
    )


def memory_of(step: StagesOfStep, schedule: Schedule) -> dict[int, Memory]:
    """Each rank's bytes: the weights of its stages, and the micro-batches that its list holds at a time."""
    stages, held, slots, layouts = step.stages, step.held, step.slots, step.layouts
    memory: dict[int, Memory] = {}
    for order in schedule.orders:
        own = sorted({action.stage for action in order})
        now = kept = most = 0
        for stage, kind, _ in order:
            if kind == FORWARD:
                now += held[stage].kept
                kept = max(kept, now)
                most = max(most, now)
            elif kind in (BACKWARD, INPUTS):
                most = max(most, now + held[stage].besides)
            if kind in (BACKWARD, WEIGHTS):
                now -= held[stage].kept
        for lane, rank in enumerate(stages[own[0]].ranks):
            is_home = rank in stages[own[0]].holders
            trained = sum(_size(variable, layouts) for stage in own for variable in stages[stage].trainable)
            weights = trained + sum(_size(variable, layouts) for stage in own for variable in stages[stage].state)
            copies, weights = (0, weights) if is_home else (trained, 0)
            of_slots = sum(slots[stage] for stage in own) * is_home
            here = step.outputs if lane == 0 and stages[-1].number in own else 0
            peak = weights + copies + of_slots + trained + most + here
            split = stages[own[0]].splits(lane)
            of_rank = Memory(weights, of_slots, trained, kept + here, peak)
            memory.update(dict.fromkeys((rank,) if split is None else split.placement.ranks, of_rank))
    return dict(sorted(memory.items()))


def _sums(axes: Sequence[str], stages: Sequence[Stage], layouts: Mapping[int, Layout]) -> list[Collective]:
    """The sums of each stage's gradients over its ranks."""
    found, lanes = [], len(stages[0].ranks)
    for stage in stages if lanes > 1 else ():
        size = sum(_size(variable, layouts) for variable in stage.trainable)
        why = f"the ranks {_listed(stage.ranks)} share the rows of stage {stage.number}"
        received = ring("all_reduce", size, lanes)
        found.append(
            Collective(
                "all_reduce",
                tuple(axes),
                lanes,
                size,
                received,
                "gradients",
                f"stage {stage.number}",
                "gradients",
                why,
                stage.number,
            )
        )
    return found


def _crossing(calls: CallGraph, stage: Stage, following: Stage, rows: int) -> tuple[int, int]:
    """Bytes that a stage sends to the next in a step, and that come back as gradients; none within a rank."""
    if stage.ranks == following.ranks:
        return 0, 0
    sizes = {key: _bytes(calls, key, rows) for key in stage.sent}
    floats = [key for key in sizes if "float" in keras.backend.standardize_dtype(calls.tensors[key].dtype)]
    return sum(sizes.values()), sum(sizes[key] for key in floats)


def _bytes(calls: CallGraph, key: int, rows: int) -> int:
    return cutting.bytes_of(calls.tensors[key]) * rows


def _size(variable: keras.Variable, layouts: Mapping[int, Layout] | None = None) -> int:
    """Bytes of a variable; with `layouts` those that one rank holds of it."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if layouts is not None:
        return whole.bytes_on_rank(layouts[id(variable)], dtype)
    return math.prod(variable.shape) * itemsize(dtype)


def _slots(model: keras.Model, stages: Sequence[Stage], layouts: Mapping[int, Layout]) -> tuple[list[int], list[str]]:
    """Bytes of the optimizer's slots for each stage's weights on a rank, and a note where they cannot be counted."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return [0] * len(stages), [whole.NOT_COMPILED]
    found, counted = [], set[int]()
    for stage in stages:
        own = [variable for variable in stage.trainable if id(variable) not in counted]
        counted.update(map(id, own))
        with dry_run(1):
            slots, notes = whole.variables_of_copy(optimizer, own)
        if notes:
            return [0] * len(stages), notes
        total = sum(_size(slot) for slot in slots if len(slot.shape))
        # slots are split as their weights are
        whole_size = sum(_size(variable) for variable in own)
        found.append(total * sum(_size(variable, layouts) for variable in own) // max(1, whole_size))
    return found, []


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
