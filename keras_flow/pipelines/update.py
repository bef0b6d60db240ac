"""The update after a pipeline's step: once for all stages, with one norm and one verdict on overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_flow.backends.active import backend

if TYPE_CHECKING:
    from keras_flow.pipelines.pipeline import Pipeline

ops: Any = keras.ops


def update(pipeline: Pipeline, optimizer: Any, gradients: Mapping[int, Sequence[Any]]) -> None:
    """Update the weights of all stages.

    Args:
        pipeline: whose.
        optimizer: the model's, built.
        gradients: stage -> one for each of its trainable weights; those of this process's stages.
    """
    exchange = pipeline.exchange
    found: dict[int, tuple[int, keras.Variable, Any]] = {}
    for stage in pipeline.stages:
        for variable, gradient in zip(stage.trainable, gradients.get(stage.number, ()), strict=False):
            rank, _, before = found.get(id(variable), (stage.rank, None, None))
            # a weight of several stages: the gradients are added where the first one is
            if before is not None and gradient is not None:
                gradient = backend().add([before], [backend().on(rank, gradient)])[0]
            found[id(variable)] = (rank, variable, before if gradient is None else gradient)
    factor = _factor(pipeline, optimizer, [gradient for *_, gradient in found.values() if gradient is not None])
    parts: dict[int, tuple[list[keras.Variable], list[Any]]] = {
        stage.rank: ([], []) for stage in pipeline.stages if stage.rank in exchange.own
    }
    for rank, variable, gradient in found.values():
        parts[rank][0].append(variable)
        parts[rank][1].append(gradient if factor is None or gradient is None else gradient * factor)
    backend().apply_gradients(
        optimizer, [(rank, *part) for rank, part in parts.items()], not pipeline.model.run_eagerly
    )


def _factor(pipeline: Pipeline, optimizer: Any, gradients: Sequence[Any]) -> float | None:
    """By what all gradients are multiplied; None for nothing.

    The optimizer sees the gradients of one rank at a time. So those are clipped by the norm of all beforehand, and
    where one of any stage is not finite none is, so that a scaled loss is judged once.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    limit = inner.global_clipnorm
    is_scaled = inner is not optimizer
    if limit is None and not is_scaled:
        return None
    squares = [ops.sum(ops.square(ops.cast(gradient, "float32"))) for gradient in gradients]
    total = pipeline.exchange.sum_on(pipeline.last.rank, squares)
    scale = float(ops.convert_to_numpy(optimizer.scale_loss(ops.ones((), "float32"))))
    norm = math.sqrt(float(ops.convert_to_numpy(total))) / scale
    if not math.isfinite(norm):
        return math.nan
    return None if limit is None or norm <= limit else limit / norm
