"""Data parallel with local tensors: a layer that acts row by row computes this rank's rows; all else is logical.

Every rank runs the step on the logical batch. Around the outermost row-wise layer (usually the model) inputs are cut to
this rank's rows, and outputs are logical tensors of which each rank holds its rows (`split_rows`): losses and metrics
add up over the ranks, and what a user's `train_step` computes from them gathers them. The gradient of a logical tensor
is the logical gradient; inside, gradients are those of the own rows times the number of ranks. Averaged over the ranks,
weights then get the sum over all rows, and terms that every rank computes whole (weight regularisers, a batch with
fewer rows than ranks) count once.

Example: 3 rows on 2 ranks, a loss that is the sum of their squares. Rank 0 computes rows 0 and 1, rank 1 row 2. The sum
of all rows has the gradient 1 on both ranks, times 2 ranks inside; rank 0 gets `2 * (g0 + g1)` for a weight and rank 1
`2 * g2`, whose mean is `g0 + g1 + g2`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends import leaves
from keras_flow.backends.hooking import hook
from keras_flow.backends.row_wise import row_interaction
from keras_flow.backends.torch import data, gradient_buckets, layouts
from keras_flow.backends.torch.rows import split_rows
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing, current_step
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

if TYPE_CHECKING:
    import keras


def call(
    original: Callable[..., object],
    step: RunningStep,
    layer: keras.Layer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a layer within a mirrored step: by own rows where it acts row by row and each rank has some, else on all."""
    rows = _common_rows((args, kwargs))
    # computed whole by all, with equal gradients: nothing to sum either
    if rows is None or not _shares(step, layer, rows):
        return original(layer, *args, **kwargs)
    if row_interaction.of_call(layer, args, kwargs) is not None:
        return original(layer, *args, **kwargs)
    placement = step.distribution.placement
    mine = rows_of(placement, rows)
    args, kwargs = data.map_call(functools.partial(split_rows.own_part, rows=mine), args, kwargs)
    # from here on gradients differ between the ranks; before, all ranks computed the same and there is nothing to sum
    reducer = gradient_buckets.reducer(placement)
    reducer.on = True
    reducer.watch_further(layer.trainable_variables)
    with computing(step, mine):
        outputs = original(layer, *args, **kwargs)
    return leaves.mapped(lambda leaf: _split(leaf, mine, layer), outputs)


@functools.lru_cache(maxsize=256)  # data may have any number of rows
def rows_of(placement: Placement, rows: int) -> OwnRows:
    """Which rows of a mirrored batch this rank computes."""
    index = placement.ranks.index(layouts.this_rank())
    return OwnRows(rows, len(placement.ranks), index, (layouts.group(placement.ranks),))


def all_sum(value: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """The sum over all blocks of rows; its gradient is the sum of the blocks' gradients."""
    return _AllSum.apply(value, rows.groups)


def _common_rows(inputs: object) -> int | None:
    row_counts = set()
    for leaf in leaves.flat(inputs):
        if isinstance(leaf, torch.Tensor):
            if leaf.ndim:
                row_counts.add(leaf.shape[0])
        elif hasattr(leaf, "shape"):
            return None
    return row_counts.pop() if len(row_counts) == 1 else None


def _shares(step: RunningStep, layer: keras.Layer, rows: int) -> bool:
    """Whether every rank gets rows; where statistics are those of a replica's rows, as many as the others."""
    plan = step.distribution.batch_plan(rows)
    if plan.divides:
        return True
    if step.distribution.batch_statistics == "replica" and _has_statistics(layer):
        return False
    return plan.rows >= plan.replicas


def _has_statistics(layer: keras.Layer) -> bool:
    return any(type(part).__name__ == "BatchNormalization" for part in layer._flatten_layers())


def _split(leaf: object, rows: OwnRows, layer: keras.Layer) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # the layer's output must have as many rows, because the others' are known by that alone
    start_stop = rows.own(rows.rows)
    own = start_stop.stop - start_stop.start
    if not leaf.ndim or leaf.shape[0] != own:
        raise FlowError(
            f"layer {layer.name!r} was given {own} rows and returned a tensor of shape {list(leaf.shape)}: data "
            "parallel needs an output with a row for each row of its input. kf.ModelParallel has no such rule"
        )
    return split_rows.split(leaf, rows)


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, groups):
        ctx.groups = groups
        return split_rows.summed(value.clone(memory_format=torch.contiguous_format), groups)

    @staticmethod
    def backward(ctx, grad):
        return _AllSum.apply(grad, ctx.groups), None


def step_on_all_rows(*args: object, **kwargs: object) -> RunningStep | None:
    """Condition of the hook on `torch.autograd.grad`: the mirrored step, while no layer computes own rows."""
    step = current_step()
    return step if step is not None and not step.consistent and step.inside is None else None


@hook(
    "torch.autograd",
    "grad",
    "a train_step that takes gradients this way would get those of this rank's rows",
    when=step_on_all_rows,
)
def autograd_grad(
    step: RunningStep,
    original: Callable[..., Sequence[torch.Tensor | None]],
    outputs: object,
    inputs: object,
    *args: object,
    **kwargs: object,
) -> tuple[torch.Tensor | None, ...]:
    """Hook on `torch.autograd.grad`: gradients of the logical batch, of weights and of what layers handed back.

    The reducer's hooks are not called, so weights' gradients are averaged here. An output of one layer that another
    took was passed on as own rows; its gradient is gathered of theirs.
    """
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)  # type: ignore[arg-type]
    own = [split_rows.own_in_graph(leaf) for leaf in wanted]
    sources = [leaf if part is None else part for leaf, part in zip(wanted, own, strict=True)]
    grads = original(outputs, sources, *args, **kwargs)
    ranks = step.distribution.placement.ranks
    groups, sums = (layouts.group(ranks),), gradient_buckets.reducer(step.distribution.placement).on
    found: list[torch.Tensor | None] = []
    for leaf, part, grad in zip(wanted, own, grads, strict=True):
        if grad is not None and isinstance(leaf, split_rows.SplitRows) and part is not None:
            grad = split_rows.gathered_gradient(grad, leaf.rows)
        elif grad is not None and sums and _is_weight(leaf):
            grad = _AllSum.apply(grad, groups) / len(ranks)
        found.append(grad)
    return tuple(found)


def _is_weight(leaf: object) -> bool:
    # the gradient of one that is gathered for its use arrives averaged
    if isinstance(leaf, DTensor):
        return False
    return isinstance(leaf, torch.nn.Parameter) and not getattr(leaf, "_keras_flow_overwritten", False)
