"""Losses on PyTorch: of a prediction of which each rank holds its rows, by own rows.

A loss is a sum over rows divided by a number. Each rank adds up its rows; the sum, and the number where it is not known
beforehand (weights, masks), are reduced: a few bytes, whatever the size of the outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from keras_flow.backends import leaves
from keras_flow.backends.hooking import hook
from keras_flow.backends.row_wise import row_operations, row_sums
from keras_flow.backends.torch import data, layouts, local_tensors
from keras_flow.backends.torch.rows import consistent_calls, partial_numbers, split_rows
from keras_flow.backends.torch.rows.split_rows import SplitRows
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing, current_step
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.keras_places import engine_numpy as numpy
from keras_flow.errors import ComputedWhole, FlowError, warn

#: what was said of losses and metrics that need all rows
_said: set[str] = set()


def own_rows(*tensors: object, of: object) -> OwnRows | None:
    """The rows by which the tensors `of` are split, where every other tensor has a row for each of them; else None."""
    predictions = leaves.flat(of)
    if not predictions or not all(isinstance(leaf, SplitRows) and leaf.own is not None for leaf in predictions):
        return None
    rows = predictions[0].rows
    others = [leaf for leaf in leaves.flat(tensors) if leaf is not None]
    # a weight for all rows, or targets that are broadcast to them, are cases for Keras's own code
    has_rows = all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows.rows,) for leaf in others)
    return rows if has_rows and all(leaf.rows == rows for leaf in predictions) else None


def say_gathered(interaction: row_operations.Interaction) -> None:
    """Warn once that a loss or a metric needs the outputs of all rows."""
    if interaction.text in _said:
        return
    _said.add(interaction.text)
    warn(
        f"{interaction.text}: every rank gathers the outputs of all rows and computes it whole (the numbers are those "
        "of one device; what a rank receives grows with the ranks)",
        ComputedWhole,
    )


def least_rank(prediction: object) -> int:
    """The least number of dims of the tensors of a prediction."""
    return min(leaf.ndim for leaf in leaves.flat(prediction))


def of_split_rows(
    loss: object, y_true: object, y_pred: object, sample_weight: object = None
) -> tuple[RunningStep, OwnRows] | None:
    """Condition of the hook on `Loss.__call__`: the step and the prediction's rows, where losses of rows add up."""
    step = current_step()
    # inside a layer's call rows are plain tensors, of which a loss would see this rank's alone
    if step is None or step.inside is not None:
        return None
    rows = own_rows(y_true, sample_weight, of=y_pred)
    if rows is None:
        return None
    # asked last, because it looks into the loss: most calls are decided before
    interaction = row_sums.of_loss(loss, least_rank(y_pred))
    if interaction is not None:
        say_gathered(interaction)
        return None
    return step, rows


@hook(
    "keras.Loss",
    "__call__",
    "losses add up own rows; without it the outputs of all rows are gathered",
    when=of_split_rows,
)
def call(
    found: tuple[RunningStep, OwnRows],
    original: Callable[..., torch.Tensor],
    loss: object,
    y_true: object,
    y_pred: object,
    sample_weight: object = None,
) -> torch.Tensor:
    """Hook on `Loss.__call__`: the losses of this rank's rows; reduced by `reduce_values`, or as they are."""
    step, rows = found
    own = functools.partial(split_rows.own_part, rows=rows)
    y_true, y_pred, sample_weight = (leaves.mapped(own, part) for part in (y_true, y_pred, sample_weight))
    with computing(step, rows):
        value = original(loss, y_true, y_pred, sample_weight)
    return split_rows.split(value, rows) if value.ndim else value


def of_whole_tensors(loss: object, y_true: object, y_pred: object, sample_weight: object = None) -> DeviceMesh | None:
    """Condition of the hook on `Loss.__call__`: the mesh of which each rank has all of every tensor.

    None for losses of the user's own, which may use weights, and others that look at more than rows.
    """
    step = current_step()
    if step is None or not step.consistent or step.inside is not None:
        return None
    layout = consistent_calls.layout_of((y_true, y_pred, sample_weight), {})
    if layout is None or row_sums.of_loss(loss, least_rank(y_pred)) is not None:
        return None
    mesh, placements, _ = layout
    return mesh if placements == layouts.replicated(mesh) else None


@hook(
    "keras.Loss", "__call__", "losses of whole tensors without DTensor's time for each operator", when=of_whole_tensors
)
def call_on_plain(
    mesh: DeviceMesh, original: Callable[..., torch.Tensor], loss: object, *tensors: object, **named: object
) -> torch.Tensor:
    """Hook on `Loss.__call__`: on plain tensors, since DTensor would do the same on each rank, more slowly."""
    tensors, named = data.map_call(consistent_calls.to_local, tensors, named)
    value = original(loss, *tensors, **named)
    return local_tensors.from_local(value, value.shape, mesh, layouts.replicated(mesh))


def rows_of_step(*args: object, **kwargs: object) -> OwnRows | None:
    """Condition of the hooks inside of losses: the rows that are being computed."""
    step = current_step()
    return step.inside if step is not None else None


@hook(
    "keras:losses",
    "reduce_values",
    "a sum over own rows is reduced; the number that divides it is that of all rows",
    when=rows_of_step,
)
def reduce_values(
    rows: OwnRows,
    original: Callable[..., torch.Tensor],
    values: torch.Tensor,
    sample_weight: torch.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
) -> torch.Tensor:
    """Hook on `reduce_values`: sums over the rows of all ranks."""
    if reduction in (None, "none"):
        return original(values, sample_weight, reduction)
    # a loss of another shape would be summed all the same, and divided by the wrong number
    own = rows.own(rows.rows)
    if values.shape[:1] != (own.stop - own.start,):
        raise FlowError(
            f"a loss was given {own.stop - own.start} rows and returned values of shape {list(values.shape)}: data "
            "parallel needs a value for each row"
        )
    loss = values.sum()
    if reduction == "sum":
        divided = loss
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        # the weights of all rows: a rank's rows may weigh more than another's
        divided = numpy.divide_no_nan(loss, split_rows.total(sample_weight.sum(), rows).to(loss.dtype))
    else:
        # known without asking the others
        divisor = core.convert_to_tensor(rows.rows * math.prod(values.shape[1:]), dtype=loss.dtype)
        divided = numpy.divide_no_nan(loss, divisor)
    # the sum over the ranks is not needed for the gradient
    return partial_numbers.partial_number(divided, rows)


@hook(
    "keras:losses",
    "apply_mask",
    "a sum over own rows is reduced; the number that divides it is that of all rows",
    when=rows_of_step,
)
def apply_mask(
    rows: OwnRows,
    original: Callable[..., torch.Tensor],
    sample_weight: torch.Tensor | None,
    mask: torch.Tensor | None,
    dtype: str,
    reduction: str | None,
) -> torch.Tensor:
    """Hook on `apply_mask`: entries are weighed by `total / valid` of all rows."""
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype=dtype, reduction=reduction)
    valid = split_rows.summed(mask.to(core.to_torch_dtype(dtype)).sum(), rows.groups)
    weight = numpy.divide_no_nan(torch.full_like(valid, rows.rows * math.prod(mask.shape[1:])), valid)
    weighed = torch.where(mask.bool(), weight, 0.0)
    return original(sample_weight, weighed, dtype=dtype, reduction="sum")
