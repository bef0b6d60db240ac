"""The update after a pipeline's step: once for all stages, with one norm and one verdict on overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_flow.backends.active import backend
from keras_flow.current import models
from keras_flow.errors import FlowError
from keras_flow.pipelines import losses

if TYPE_CHECKING:
    from keras_flow.pipelines.staged_model import StagedModel

ops: Any = keras.ops


def update(pipeline: StagedModel, optimizer: Any, gradients: Mapping[int, Sequence[Any]], scale: float) -> None:
    """Update the weights of all stages.

    Args:
        pipeline: whose.
        optimizer: the model's, built.
        gradients: stage -> one for each of its trainable weights; those of this process's stages.
        scale: by what they are multiplied.
    """
    lanes = pipeline.lanes
    holders = {rank for stage in pipeline.stages for rank in stage.holders}
    # of the lanes of a process one alone has its variables
    own = [lane for lane in lanes.own if any(lane.rank(stage.number) in holders for stage in pipeline.stages)]
    found = [each for lane in own for each in lane.gradients_at_home(pipeline.stages, gradients)]
    found = [each for each in found if each[0] in holders and each[2] is not None]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # each weight is counted once, whatever ranks have it
    homes = {stage.rank for stage in pipeline.stages}
    counted = [(variable, gradient) for rank, variable, gradient in found if rank in homes]
    judges = inner is not optimizer
    distribution = models.distribution_of(pipeline.model)
    if inner.gradient_accumulation_steps and inner.global_clipnorm is not None and distribution.zero_stage:  # type: ignore[union-attr]
        raise FlowError(
            "PipelineParallel(zero=1) with gradient_accumulation_steps and global_clipnorm: no rank has a whole sum, "
            "and the norm is that of all. Leave one out"
        )
    clips = _clips_now(inner)
    norm = _global_norm(pipeline, inner, scale, counted, clips) if judges or clips else 0.0
    if judges:
        _move_scale(optimizer, math.isfinite(norm))
        if not math.isfinite(norm):
            return
    limit = inner.global_clipnorm if clips else None
    clip = 1.0 if limit is None or norm <= limit else limit / norm
    factor = clip / scale if judges else clip  # an optimizer takes its own `loss_scale_factor` off itself
    parts: dict[int, tuple[list[keras.Variable], list[Any]]] = {}
    for rank, variable, gradient in found:
        variables, of_rank = parts.setdefault(rank, ([], []))
        variables.append(variable)
        of_rank.append(gradient if factor == 1.0 else ops.multiply(gradient, factor))
        summed = _summed_before(inner, variable)
        if summed is not None and clip != 1.0:
            backend().write(summed, ops.multiply(backend().read(summed), clip))
    if parts:
        ranks = [(rank, *part) for rank, part in parts.items()]
        backend().apply_gradients(inner, ranks, not pipeline.model.run_eagerly, pipeline.updates)
    else:  # nothing of this process is trained: its counter moves on as those of others do
        inner._iterations.assign_add(1)


def _clips_now(optimizer: Any) -> bool:
    """Whether gradients are clipped by the norm of all: with accumulation in the steps that update."""
    steps = optimizer.gradient_accumulation_steps
    if optimizer.global_clipnorm is None or not steps:
        return optimizer.global_clipnorm is not None
    return (int(ops.convert_to_numpy(optimizer._iterations.value)) + 1) % steps == 0


def _global_norm(
    pipeline: StagedModel, optimizer: Any, scale: float, gradients: Sequence[tuple[Any, Any]], clips: bool
) -> float:
    """The norm of the gradients of all stages, as the optimizer would clip by it.

    The optimizer sees the gradients of one rank at a time. So they are clipped by the norm of all beforehand, and a
    scaled loss is judged once for all stages. With accumulation it is the norm of the mean over the steps.
    """
    squares = []
    for variable, gradient in gradients:
        own = ops.divide(ops.cast(gradient, losses.dtype()), scale)
        summed = _summed_before(optimizer, variable) if clips else None
        if summed is not None:
            mean = ops.add(own, ops.cast(backend().read(summed), losses.dtype()))
            own = ops.divide(mean, optimizer.gradient_accumulation_steps)
        squares.append(ops.sum(ops.square(own)))
    return math.sqrt(float(ops.convert_to_numpy(pipeline.lanes.sum_on(pipeline.last.rank, squares))))


def _summed_before(optimizer: Any, variable: keras.Variable) -> Any:
    """What an optimizer has accumulated of a variable's gradients; None without accumulation."""
    if not optimizer.gradient_accumulation_steps:
        return None
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def _move_scale(optimizer: Any, is_finite: bool) -> None:
    """Move the scale of a `LossScaleOptimizer` as it does: half after an overflow, twice after so many steps without.

    Its own method does that in a branch of the engine's, around the update.
    """
    steps = int(ops.convert_to_numpy(optimizer.step_counter.value))
    if not is_finite:
        optimizer.dynamic_scale.assign(optimizer.dynamic_scale / 2.0)
        optimizer.step_counter.assign(0)
    elif steps == optimizer.dynamic_growth_steps - 1:
        optimizer.dynamic_scale.assign(optimizer.dynamic_scale * 2.0)
        optimizer.step_counter.assign(0)
    else:
        optimizer.step_counter.assign(steps + 1)
