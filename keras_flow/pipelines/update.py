"""The update after a pipeline's step: once for all stages, with one norm and one verdict on overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_flow.backends.active import backend

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
    found = [each for each in found if each[0] in holders]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # each weight is counted once, whatever ranks have it
    homes = {stage.rank for stage in pipeline.stages}
    values = [gradient for rank, _, gradient in found if gradient is not None and rank in homes]
    is_finite, factor = _factor(pipeline, inner, scale, values, judges=inner is not optimizer)
    if inner is not optimizer:
        _move_scale(optimizer, is_finite)
    if not is_finite:
        return
    parts: dict[int, tuple[list[keras.Variable], list[Any]]] = {
        lane.rank(stage.number): ([], []) for lane in own for stage in pipeline.stages if lane.is_own(stage.number)
    }
    for rank, variable, gradient in found:
        parts[rank][0].append(variable)
        parts[rank][1].append(gradient if factor == 1.0 or gradient is None else ops.multiply(gradient, factor))
    backend().apply_gradients(inner, [(rank, *part) for rank, part in parts.items()], not pipeline.model.run_eagerly)


def _factor(
    pipeline: StagedModel, optimizer: Any, scale: float, gradients: Sequence[Any], judges: bool
) -> tuple[bool, float]:
    """Whether all gradients are finite, where that is asked, and by what they are multiplied.

    The optimizer sees the gradients of one rank at a time. So they are clipped by the norm of all beforehand, and a
    scaled loss is judged once for all stages.
    """
    # an optimizer of its own takes its `loss_scale_factor` off itself
    own = 1.0 if optimizer.loss_scale_factor is None else float(optimizer.loss_scale_factor)
    if optimizer.global_clipnorm is None and not judges:
        return True, 1.0
    squares = [ops.sum(ops.square(ops.divide(ops.cast(gradient, "float32"), scale))) for gradient in gradients]
    total = float(ops.convert_to_numpy(pipeline.lanes.sum_on(pipeline.last.rank, squares)))
    if judges and not math.isfinite(total):
        return False, 1.0
    norm, limit = math.sqrt(total), optimizer.global_clipnorm
    return True, own / scale * (1.0 if limit is None or norm <= limit else limit / norm)


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
