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
import torch.distributed as torch_distributed

from keras_flow.backends import leaves, row_interaction, states
from keras_flow.backends.torch import data, layouts, partial_numbers, profiling, split_rows
from keras_flow.backends.torch.partial_numbers import Addition
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing, current_step
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

if TYPE_CHECKING:
    import keras

#: bytes of gradients that travel together, while the backward pass goes on
_BUCKET_BYTES = 4 << 20


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
    reducer(placement).on = True
    with computing(step, mine):
        outputs = original(layer, *args, **kwargs)
    return leaves.mapped(lambda leaf: _split(leaf, mine, layer), outputs)


@functools.cache
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


def autograd_grad(
    step: RunningStep,
    original: Callable[..., Sequence[torch.Tensor | None]],
    outputs: object,
    inputs: object,
    *args: object,
    **kwargs: object,
) -> tuple[torch.Tensor | None, ...]:
    """Hook on `torch.autograd.grad`, by which the reducer's hooks are not called: average the weights' gradients."""
    grads = original(outputs, inputs, *args, **kwargs)
    ranks = step.distribution.placement.ranks
    if not reducer(step.distribution.placement).on:
        return tuple(grads)
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)  # type: ignore[arg-type]
    groups = (layouts.group(ranks),)
    return tuple(
        _AllSum.apply(grad, groups) / len(ranks) if grad is not None and _is_weight(leaf) else grad
        for leaf, grad in zip(wanted, grads, strict=True)
    )


def _is_weight(leaf: object) -> bool:
    return isinstance(leaf, torch.nn.Parameter) and not getattr(leaf, "_keras_flow_overwritten", False)


class _FlatMemory:
    """Flat tensors of buckets, taken again once nothing of the gradients that they became is held any more.

    New memory in each step would cost as much as the sum of its gradients: the system clears each page.
    """

    def __init__(self) -> None:
        #: the tensors, and how many hold the memory of one that is free
        self._tensors: list[tuple[torch.Tensor, int]] = []

    def of(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of this length, of the dtype and on the device of another; its values are any."""
        for place, (flat, idle) in enumerate(self._tensors):
            if flat.dtype != like.dtype or flat.device != like.device or _holders(flat) != idle:
                continue
            if len(flat) == length:
                return flat
            # another model, or another order of its gradients: it is free, and no use
            del self._tensors[place]
            break
        flat = torch.empty(length, dtype=like.dtype, device=like.device)
        self._tensors.append((flat, _holders(flat)))
        return flat


def _holders(flat: torch.Tensor) -> int:
    """How many tensors have a tensor's memory; private, checked with torch 2.13."""
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)


@functools.cache
def reducer(placement: Placement) -> Reducer:
    """The gradient reducer of a placement's ranks."""
    return Reducer(placement)


class Reducer:
    """Averages gradients over the ranks while the backward pass goes on, in buckets, complete when `backward` returns.

    Gradients become ready in the same order on all ranks, because all run the same graph, so buckets are filled as they
    come.

    Attributes:
        on: a layer of this step was computed by own rows; otherwise all ranks hold the same gradients already.
        collectives: number of all-reduces so far.
    """

    def __init__(self, placement: Placement):
        self._placement = placement
        self._waiting: list[torch.nn.Parameter] = []
        self._bytes = 0
        self._sent: list[
            tuple[torch_distributed.Work | None, torch.Tensor, list[torch.nn.Parameter], list[Addition]]
        ] = []
        self._memory, self._watched = _FlatMemory(), []
        self._closing = False
        self.on = False
        self.collectives = 0

    def attach(self, variables: Sequence[keras.Variable]) -> None:
        """Watch the gradients of these variables; called before each training step, so new ones are found."""
        self.reset()
        watched = [id(variable) for variable in variables]
        if watched != self._watched:  # of another model
            self._memory, self._watched = _FlatMemory(), watched
        for variable in variables:
            stored = variable._value
            # what it is given is its next value: not averaged, so that a difference is found (`copies.compare_state`)
            if states.is_overwritten(variable):
                stored._keras_flow_overwritten = True
                continue
            # a variable that was re-laid has a new Parameter, without a hook
            if stored is not None and stored.requires_grad and getattr(stored, "_keras_flow_reducer", None) is not self:
                stored.register_post_accumulate_grad_hook(self._ready)
                stored._keras_flow_reducer = self
                stored._keras_flow_path = variable.path

    def reset(self) -> None:
        """Forget a pass that did not end."""
        self._waiting, self._sent, self._bytes, self._closing, self.on = [], [], 0, False, False

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        # no layer computed own rows: all ranks have the same gradients
        if not self.on:
            return
        if not self._closing:
            self._closing = True
            # runs when this backward pass ends: only then is it known that no gradient is left to send
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        # a bucket is one flat tensor, which has one dtype
        if self._waiting and self._waiting[-1].dtype != parameter.dtype:
            self._send()
        self._waiting.append(parameter)
        self._bytes += parameter.numel() * parameter.element_size()
        if self._bytes >= _BUCKET_BYTES:
            self._send()

    def _send(self, last: bool = False) -> None:
        if not self._waiting:
            return
        group = layouts.group(self._placement.ranks)
        # the loss is known by now, and what it adds to the logs needs no message of its own
        additions = partial_numbers.take(group, self._waiting[0].dtype) if last else []
        gradients = [parameter.grad.reshape(-1) for parameter in self._waiting]  # type: ignore[union-attr]
        added = [addition.value.reshape(-1) for addition in additions]
        flat = self._memory.of(sum(map(len, (*gradients, *added))), gradients[0])
        pieces = flat.split([*map(len, gradients), *map(len, added)])
        for gradient, piece in zip(gradients, pieces, strict=False):
            # before the sum: half precision would overflow after it
            torch.div(gradient, len(self._placement.ranks), out=piece)
        for value, piece in zip(added, pieces[len(gradients) :], strict=True):
            piece.copy_(value)
        with profiling.gradients_of(parameter._keras_flow_path for parameter in self._waiting):  # type: ignore[attr-defined]
            work = torch_distributed.all_reduce(flat, group=group, async_op=True)
        self._sent.append((work, flat, self._waiting, additions))
        self._waiting, self._bytes = [], 0
        self.collectives += 1

    def _finish(self) -> None:
        self._send(last=True)
        sent, self._sent, self._closing = self._sent, [], False
        for work, flat, parameters, additions in sent:
            if work is not None:
                work.wait()
            sizes = [parameter.numel() for parameter in parameters]
            gradients, rest = flat.split([sum(sizes), len(flat) - sum(sizes)])
            for parameter, piece in zip(parameters, gradients.split(sizes), strict=True):
                parameter.grad = piece.view(parameter.shape)
            partial_numbers.finish(additions, rest)
