"""Metrics on PyTorch: those whose state is a sum over rows add up own rows, and are reduced together.

A metric's state is equal on all ranks where it is read. In a step each rank computes what its rows add to it, from a
state of zeros. All of these wait (`partial_numbers`) and travel in one all-reduce, some bytes for each metric whatever
the size of the outputs: with the step's last gradients, when something reads one of them, or at the end of an epoch
where nothing reads the logs of a batch (`log_readers`).

Example: accuracy, 3 rows on 2 ranks. Rank 0 has 2 rows, of which 1 is right: it adds `total 1, count 2`; rank 1 adds
`total 1, count 1`. Both add the sum, `total 2, count 3`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from keras.src import tree

from keras_flow.backends import row_interaction
from keras_flow.backends.torch import layers, losses, partial_numbers, rowwise_calls, split_rows
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing

if TYPE_CHECKING:
    import keras


def update(
    step: RunningStep,
    original: Callable[..., object],
    metrics: object,
    y_true: object,
    y_pred: object,
    sample_weight: object = None,
) -> None:
    """Hook on `MetricsList.update_state`: metrics of one output, by own rows where they add up, else on all rows."""
    parts = (y_true, y_pred, sample_weight)
    by_rows, rank = _by_rows(step, *parts), losses.least_rank(y_pred)
    for metric in metrics.metrics:  # type: ignore[attr-defined]
        interaction = row_interaction.of_metric(metric, rank)
        if by_rows is None or interaction is not None or not _is_built(metric):
            if by_rows is not None and interaction is not None:
                losses.say_gathered(interaction)
            y_true, y_pred, sample_weight = (tree.map_structure(_whole, part) for part in parts)
            metric.update_state(y_true, y_pred, sample_weight=sample_weight)
            continue
        rows, own = by_rows
        nothing = [torch.zeros_like(partial_numbers.before(variable)) for variable in metric.variables]
        with torch.no_grad(), computing(step, rows):
            added = metric.stateless_update_state(nothing, own[0], own[1], sample_weight=own[2])
        for variable, value in zip(metric.variables, added, strict=True):
            partial_numbers.add_later(variable, value, rows)


def _by_rows(
    step: RunningStep, y_true: object, y_pred: object, sample_weight: object
) -> tuple[OwnRows, tuple[object, ...]] | None:
    """The rows that this rank has of all parts, and the parts of them; None where they are not split by rows alone."""
    parts = (y_true, y_pred, sample_weight)
    if step.consistent:
        # in the consistent view all parts must be split along the rows by the same axes, and along nothing else
        layout = rowwise_calls.layout_of(parts, {})
        if layout is None:
            return None
        return rowwise_calls.rows_of(*layout), tuple(tree.map_structure(rowwise_calls.to_local, part) for part in parts)
    rows = losses.own_rows(y_true, sample_weight, of=y_pred)
    if rows is None:
        return None
    own = functools.partial(split_rows.own_part, rows=rows)
    return rows, tuple(tree.map_structure(own, part) for part in parts)


def _is_built(metric: keras.Metric) -> bool:
    """Whether the metric has its variables: some make them at the first update."""
    return bool(metric.variables) and getattr(metric, "_built", True)


def _whole(leaf: object) -> object:
    return layers.plain_with_mask(split_rows.gathered(leaf))
