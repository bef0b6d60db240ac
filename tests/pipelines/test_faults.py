"""Faults that are put into a pipeline's step are seen by the comparison with one device."""

from __future__ import annotations

from typing import Any

import pytest


def _one_gradient_dropped() -> list[str]:
    from keras_flow.pipelines import passes
    from tests.pipelines import models

    added = passes.Pass._add

    def drops(run: Any, stage: Any, gradients: Any) -> None:
        if not hasattr(run, "dropped"):
            run.dropped = True
            return
        added(run, stage, gradients)

    passes.Pass._add = drops  # type: ignore[method-assign]
    try:
        return models.off(("dense",), ("gpipe",))
    finally:
        passes.Pass._add = added  # type: ignore[method-assign]


def _means_of_means() -> list[str]:
    import numpy as np

    from keras_flow.pipelines import losses
    from tests.pipelines import models

    right = losses.shares
    losses.shares = lambda *args: np.full_like(right(*args), 0.25)  # type: ignore[assignment]
    try:
        return models.off(("dense",), ("gpipe",))
    finally:
        losses.shares = right


def _tied_counted_once_more() -> list[str]:
    from keras_flow.pipelines import staged_model
    from tests.pipelines import models

    right = staged_model.update

    def twice(of: Any, optimizer: Any, gradients: Any, scale: float) -> None:
        last = max(gradients)
        right(of, optimizer, {**gradients, last: [2 * gradient for gradient in gradients[last]]}, scale)

    staged_model.update = twice  # type: ignore[assignment]
    try:
        return models.off(("tied",), ("gpipe",))
    finally:
        staged_model.update = right


def _a_stage_steps_early() -> list[str]:
    from keras_flow.pipelines import passes
    from tests.pipelines import models

    added = passes.Pass._add

    def steps(run: Any, stage: Any, gradients: Any) -> None:
        added(run, stage, gradients)
        weights = run._weights[stage.number]
        run._weights[stage.number] = [one - 0.1 * other for one, other in zip(weights, gradients, strict=True)]

    passes.Pass._add = steps  # type: ignore[method-assign]
    try:
        return models.off(("dense",), ("1f1b",))
    finally:
        passes.Pass._add = added  # type: ignore[method-assign]


def _counted_by_each_rank() -> list[str]:
    from keras_flow.pipelines import lanes
    from tests.pipelines import models

    right = lanes.Lanes.sum_on

    def by_each(of: Any, rank: int, values: Any) -> Any:
        counts, of.counts = of.counts, True
        try:
            return right(of, rank, values)
        finally:
            of.counts = counts

    lanes.Lanes.sum_on = by_each  # type: ignore[method-assign]
    try:
        return models.off(("tied_norm",), ("1f1b+split",))
    finally:
        lanes.Lanes.sum_on = right  # type: ignore[method-assign]


def test_a_norm_that_each_rank_of_a_lane_counts_is_seen(on_ranks: Any) -> None:
    assert any("weights are off" in text for text in on_ranks("torch")(_counted_by_each_rank))


@pytest.mark.parametrize(
    "fault", [_one_gradient_dropped, _means_of_means, _tied_counted_once_more, _a_stage_steps_early]
)
def test_a_fault_is_seen(fault: Any, on_ranks: Any) -> None:
    assert any("weights are off" in text for text in on_ranks("tensorflow")(fault))
