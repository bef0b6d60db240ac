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
import inspect
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends import leaves
from keras_flow.backends.hooking import Hook, hook, wrap
from keras_flow.backends.row_wise import row_sums
from keras_flow.backends.torch import layers, step
from keras_flow.backends.torch.rows import consistent_calls, losses, partial_numbers, split_rows
from keras_flow.backends.torch.rows.partial_numbers import PartialNumber
from keras_flow.backends.torch.rows.split_rows import DeferredTensor
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing, current_step
from keras_flow.current import reachable
from keras_flow.current.keras_places import get_keras_mask, in_stateless_scope, is_of_keras

if TYPE_CHECKING:
    import keras


@hook(
    "keras:compile_utils",
    "MetricsList.update_state",
    "metrics add up own rows; others use operators that DTensor has no rules for, on all rows",
    when=step.running_step,
)
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
        if by_rows is not None and _add_own(step, metric, rank, *by_rows):
            continue
        y_true, y_pred, sample_weight = (leaves.mapped(_whole, part) for part in parts)
        metric.update_state(y_true, y_pred, sample_weight=sample_weight)


def place(model: keras.Model) -> None:
    """Let Keras's metrics that a model reaches add up own rows where a `train_step` of the user updates them."""
    import keras

    for metric, _ in reachable.objects(keras.Metric, model):
        method = metric.update_state
        if "update_state" in vars(metric) or not is_of_keras(method, "metrics"):
            continue
        if type(metric) is keras.metrics.Mean:
            when, replacement = step_of_number, update_mean
        elif list(inspect.signature(method).parameters)[:2] == ["y_true", "y_pred"]:
            when, replacement = outside_of_layers, update_one
        else:
            continue
        of_class = SimpleNamespace(update_state=type(metric).update_state)
        hooked = wrap(of_class, "update_state", Hook("keras.Metric", "update_state", replacement, "", when))
        # a method, which copies of the metric take as their own; not by `setattr`, where Keras looks for variables
        vars(metric)["update_state"] = MethodType(hooked, metric)


def outside_of_layers(*args: object, **kwargs: object) -> RunningStep | None:
    """Condition of `update_state` of Keras's metrics: the step, where no rank's own rows are computed."""
    step = current_step()
    return step if step is not None and step.inside is None else None


def update_one(
    step: RunningStep,
    original: Callable[..., object],
    metric: keras.Metric,
    y_true: object,
    y_pred: object,
    sample_weight: object = None,
) -> object:
    """Hook on `update_state` of Keras's metrics, which a `train_step` of the user calls: by own rows, as in a list."""
    by_rows = _by_rows(step, y_true, y_pred, sample_weight)
    if by_rows is not None and _add_own(step, metric, losses.least_rank(y_pred), *by_rows):
        return None
    return original(metric, y_true, y_pred, sample_weight=sample_weight)


def step_of_number(metric: Any, values: object, sample_weight: object = None, *args: object) -> RunningStep | None:
    """Condition of `update_state` of a Mean: the step, where a number is added: a loss, for so many rows."""
    step = outside_of_layers()
    if step is None or in_stateless_scope():
        return None
    if not isinstance(values, torch.Tensor) or values.ndim or values.dtype != metric.total._value.dtype:
        return None
    if not (sample_weight is None or isinstance(sample_weight, int | float)) or get_keras_mask(values) is not None:
        return None
    if isinstance(values, PartialNumber):
        # a variable that is no metric's is read without an operator: by the optimizer, by a file's writer
        return step if values.own is not None and getattr(metric.total, "_keras_flow_plain", False) else None
    is_whole = not isinstance(values, DTensor) or all(part.is_replicate() for part in values.placements)
    is_plain = not any(isinstance(variable._value, DTensor) for variable in metric.variables)
    return step if is_whole and is_plain and not isinstance(values, DeferredTensor) else None


def update_mean(
    step: RunningStep,
    original: Callable[..., object],
    metric: Any,
    values: torch.Tensor,
    sample_weight: float | None = None,
) -> None:
    """Hook on `Mean.update_state`: add the weighted number and the weight, in a fifth of Keras's operators."""
    weight = 1 if sample_weight is None else sample_weight
    with torch.no_grad():
        partial_numbers.before(metric.count).add_(weight)
        if isinstance(values, PartialNumber):
            partial_numbers.add_later(metric.total, values.own * weight, values.rows)  # type: ignore[operator]
        else:
            local = values._local_tensor if isinstance(values, DTensor) else values
            partial_numbers.before(metric.total).add_(local * weight)


def _add_own(
    step: RunningStep, metric: keras.Metric, rank: int, rows: OwnRows, own: tuple[object, object, object]
) -> bool:
    """Add what this rank's rows add, when it is read; False where that is not the metric of all rows."""
    interaction = row_sums.of_metric(metric, rank)
    if interaction is not None:
        losses.say_gathered(interaction)
        return False
    variables = [partial_numbers.before(variable) for variable in metric.variables]
    # some make their variables at the first update; those of a metric that the model does not know may be split
    if not variables or not getattr(metric, "_built", True) or any(isinstance(value, DTensor) for value in variables):
        return False
    nothing = [torch.zeros_like(value) for value in variables]
    with torch.no_grad(), computing(step, rows):
        added = metric.stateless_update_state(nothing, own[0], own[1], sample_weight=own[2])
    for variable, value in zip(metric.variables, added, strict=True):
        partial_numbers.add_later(variable, value, rows)
    return True


def _by_rows(
    step: RunningStep, y_true: object, y_pred: object, sample_weight: object
) -> tuple[OwnRows, tuple[object, object, object]] | None:
    """The rows that this rank has of all parts, and the parts of them; None where they are not split by rows alone."""
    parts = (y_true, y_pred, sample_weight)
    if step.consistent:
        # in the consistent view all parts must be split along the rows by the same axes, and along nothing else
        layout = consistent_calls.layout_of(parts, {})
        if layout is None:
            return None
        y_true, y_pred, sample_weight = (leaves.mapped(consistent_calls.to_local, part) for part in parts)
        return consistent_calls.rows_of(*layout), (y_true, y_pred, sample_weight)
    rows = losses.own_rows(y_true, sample_weight, of=y_pred)
    if rows is None:
        return None
    own = functools.partial(split_rows.own_part, rows=rows)
    y_true, y_pred, sample_weight = (leaves.mapped(own, part) for part in parts)
    return rows, (y_true, y_pred, sample_weight)


def _whole(leaf: object) -> object:
    plain = split_rows.gathered(leaf)
    return layers.plain_with_mask(leaves.with_mask_of(leaf, plain, split_rows.gathered))
