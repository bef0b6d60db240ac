"""Layers on PyTorch: calls by own rows or as logical tensors, and BatchNormalization's statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends import leaves
from keras_flow.backends.hooking import hook
from keras_flow.backends.rendezvous import meeting
from keras_flow.backends.row_wise import own_code
from keras_flow.backends.torch import (
    data,
    gathered_weights,
    handed_out,
    layouts,
    local_tensors,
    short_calls,
    step,
    variables,
)
from keras_flow.backends.torch.operators import reading_dtensors
from keras_flow.backends.torch.rows import consistent_calls, mirrored_calls, split_rows
from keras_flow.backends.torch.step import RunningStep, current_step, running
from keras_flow.current.batch_statistics import by_groups, refuse_renorm
from keras_flow.current.distribution import active
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.keras_places import get_global_attribute, in_symbolic_scope
from keras_flow.current.variable_layout import keras_layout

if TYPE_CHECKING:
    from keras_flow.current.distribution import Distribution


def step_or_distribution(layer: keras.Layer, *args: object, **kwargs: object) -> RunningStep | Distribution | None:
    """Condition of the hook on `Layer.__call__`: the running step, else the layer's distribution.

    The latter where its variables are DTensors or will be. None while Keras infers shapes.
    """
    # Keras infers shapes: there are no values to split
    if core.get_device() == "meta" or in_symbolic_scope():
        return None
    step = current_step()
    if step is not None:
        return step
    # within another layer's call: that one was asked already, with these variables among its own
    if get_global_attribute("current_call_ctx") is not None:
        return None
    return _distribution_of(layer) or _building_for(layer)


@hook(
    "keras.Layer",
    "__call__",
    "data parallel computes own rows in it; partial sums leave it reduced; model(x) outside a step works",
    when=step_or_distribution,
)
def call(
    context: RunningStep | Distribution,
    original: Callable[..., object],
    layer: keras.Layer,
    *args: object,
    **kwargs: object,
) -> object:
    """Hook on `Layer.__call__`: in a mirrored step by this rank's rows, in a consistent one by rows or as DTensors.

    Outside of a step logical tensors in and out.
    """
    if not isinstance(context, RunningStep):
        return _call_outside(context, original, layer, args, kwargs)
    if not context.distribution.gathers_weights:
        return _call_in_step(context, original, layer, args, kwargs)
    with gathered_weights.within_call(context, layer):
        return _call_in_step(context, original, layer, args, kwargs)


def _call_in_step(
    step: RunningStep,
    original: Callable[..., object],
    layer: keras.Layer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    # a layer within a layer that computes this rank's rows already
    if step.inside is not None:
        return short_calls.call(original, layer, args, kwargs)
    if not step.consistent:
        other = _distribution_of(layer)
        if other is not None and other.whole is not step.distribution.whole:  # a teacher's, laid by another
            args, kwargs = leaves.mapped(_all_rows, (args, kwargs))
            with running(None):
                return _call_outside(other, original, layer, args, kwargs)
        return mirrored_calls.call(original, step, layer, args, kwargs)
    outputs = _consistent(step, original, layer, args, kwargs)
    return leaves.mapped(handed_out.through_plain, outputs) if handed_out.is_one(layer) else outputs


def _all_rows(leaf: object) -> object:
    # a copy is plain, and in autograd's sight
    return leaf.clone() if isinstance(leaf, split_rows.DeferredTensor) else leaf


def _consistent(
    step: RunningStep,
    original: Callable[..., object],
    layer: keras.Layer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    with step.within(layer.path or layer.name):
        # on plain tensors where that is exact: DTensor costs some ten microseconds for each operator
        if consistent_calls.can_run(layer, args, kwargs):
            return consistent_calls.call(original, step, layer, args, kwargs)
        outputs = short_calls.call(original, layer, args, kwargs)
    outputs = leaves.mapped(pin, outputs)
    # after a sum has been reduced, since a sum belongs to no rank's rows
    return consistent_calls.by_rows_again(outputs, (args, kwargs)) if step.distribution.mirrored_view else outputs


def _call_outside(
    distribution: Distribution,
    original: Callable[..., object],
    layer: keras.Layer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """A call by the program itself: logical tensors in, logical tensors out."""
    # a functional model is being defined
    if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves.flat((args, kwargs))):
        return original(layer, *args, **kwargs)
    if _distribution_of(layer) is None:  # its first call makes its variables
        # inputs are left to it, since it may preprocess
        with running(RunningStep(distribution, consistent=True)):
            return leaves.mapped(plain_with_mask, original(layer, *args, **kwargs))

    def convert(leaf: object) -> object:
        return data.to_tensors(leaf) if hasattr(leaf, "__array__") else leaf

    own_code.look_at_classes()  # which no loop has done for this call
    reading_dtensors.meet_holders([variable._value for variable in layer.variables], meeting.CALLS)
    args, kwargs = data.map_call(convert, args, kwargs)
    inner = handed_out.inner_outputs(layer, args, kwargs)
    if inner is None:  # in autograd's sight from the inputs to each output
        with consistent_calls.plain_weights(layer):
            return original(layer, *args, **kwargs)
    args, kwargs = data.put_batch((args, kwargs), distribution)  # type: ignore[misc]
    with running(RunningStep(distribution, consistent=True)), handed_out.handing_out(inner):
        return leaves.mapped(plain_with_mask, original(layer, *args, **kwargs))


def distribution_outside(layer: keras.Layer, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on a layer's regularisation losses: its distribution, outside of steps."""
    return _distribution_of(layer) if current_step() is None else None


@hook(
    "keras.Layer",
    "_get_regularization_losses",
    "model.losses outside of a step: plain losses do not mix with DTensors",
    when=distribution_outside,
)
def regularization(
    distribution: Distribution, original: Callable[..., list], layer: keras.Layer, *args: object, **kwargs: object
) -> object:
    """Hook on `Layer._get_regularization_losses`: plain tensors, which a program adds to the loss of a call."""
    reading_dtensors.meet_to_read(
        *(weight._value for weight in layer.trainable_weights if weight.regularizer is not None)
    )
    with running(RunningStep(distribution, consistent=True)):
        return leaves.mapped(variables.to_logical, original(layer, *args, **kwargs))


def plain_with_mask(leaf: object) -> object:
    """The logical tensor of a DTensor, with its mask; anything else as it is."""
    plain = getattr(leaf, "keras_flow_plain", None)
    return leaves.with_mask_of(leaf, variables.to_logical(leaf) if plain is None else plain, variables.to_logical)


def _distribution_of(layer: keras.Layer) -> Distribution | None:
    # one variable on the mesh is enough: a layer's variables are laid by one distribution
    for variable in layer.variables:
        if isinstance(variable._value, DTensor):
            layout = keras_layout(variable)
            return layout.distribution if layout is not None else None
    return None


def _building_for(layer: keras.Layer) -> Distribution | None:
    """The distribution that a layer's variables will have: those of a subclassed model are made in its first call."""
    distribution = active()
    if distribution is None or distribution.mirrored_view or not layouts.distributed(distribution.placement):
        return None
    return distribution if any(not part.built for part in layer._flatten_layers()) else None


# ---- outputs that are sums


def pin(value: object) -> object:
    """Reduce a partial sum once, and its gradient too, instead of by every consumer."""
    if not isinstance(value, DTensor):
        return value
    differentiated = value.requires_grad and torch.is_grad_enabled()
    is_partial = any(part.is_partial() for part in value.placements)
    if differentiated and value.grad_fn is not None and not is_partial:
        # the tensor itself: a program may write into it (`dense(x) *= 2`), which torch forbids for a Function's view
        value.register_hook(local_tensors.summed)
        return value
    return leaves.with_mask_of(value, _Pin.apply(value) if differentiated else local_tensors.summed(value))


class _Pin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        out = local_tensors.summed(value)
        return value.view_as(value) if out is value else out

    @staticmethod
    def backward(ctx, grad):
        return local_tensors.summed(grad)


# ---- BatchNormalization


@hook(
    "keras.layers.BatchNormalization", "_moments", "statistics of all rows, not of this rank's", when=step.running_step
)
def moments(
    step: RunningStep,
    original: Callable[..., object],
    layer: keras.Layer,
    inputs: torch.Tensor,
    mask: torch.Tensor | None,
) -> object:
    """Hook on `BatchNormalization._moments`: statistics of all rows, by one reduction where Keras would make two."""
    if step.inside is None and not isinstance(inputs, DTensor):
        return original(layer, inputs, mask)
    if step.inside is not None and step.distribution.batch_statistics == "replica":
        return original(layer, inputs, mask)
    axes = tuple(layer._reduction_axes)
    if mask is None:
        # E[x²] - E[x]², both sums in one message
        sums = torch.stack([inputs.sum(axes), inputs.square().sum(axes)])
        rows = inputs.shape[0] if step.inside is None else step.inside.logical(inputs.shape[0])
        count = math.prod(inputs.shape[axis] if axis else rows for axis in axes)
        mean, square = _total(sums, step) / count
        return mean, square - mean.square()
    # Keras's two passes for masked rows: deviations are taken from the mean
    keep = mask.bool().unsqueeze(-1).expand(inputs.shape)
    zero = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
    sums = _total(torch.stack([torch.where(keep, inputs, zero).sum(axes), keep.to(inputs.dtype).sum(axes)]), step)
    count = sums[1] + keras.config.epsilon()
    mean = sums[0] / count
    spread = mean  # along the layer's axis, which need not be the last one
    for axis in sorted(axis % inputs.ndim for axis in axes):
        spread = spread.unsqueeze(axis)
    deviation = _total(torch.where(keep, inputs - spread, zero).square().sum(axes), step)
    return mean, deviation / count


def _total(sums: torch.Tensor, step: RunningStep) -> torch.Tensor:
    return mirrored_calls.all_sum(sums, step.inside) if step.inside is not None else pin(sums)  # type: ignore[return-value]


def wants_replica_statistics(layer: object, *args: object, **kwargs: object) -> RunningStep | None:
    """Condition of the hook on `BatchNormalization.call`: the step, where it wants statistics by replica."""
    step = current_step()
    return step if step is not None and step.distribution.batch_statistics == "replica" else None


@hook("keras.layers.BatchNormalization", "call", "statistics by replica where asked for", when=wants_replica_statistics)
def batch_normalization(
    step: RunningStep,
    original: Callable[..., torch.Tensor],
    layer: keras.Layer,
    inputs: torch.Tensor,
    training: bool | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hook on `BatchNormalization.call`: statistics of each group of rows, and their mean for the moving statistics."""
    if not (training and layer.trainable):
        return original(layer, inputs, training=training, mask=mask)
    refuse_renorm(layer)
    rows = step.inside
    if rows is None or rows.count == 1:
        replicas = step.distribution.num_model_replicas
        return by_groups(original, layer, inputs, replicas, training, mask)  # type: ignore[return-value]
    output = original(layer, inputs, training=training, mask=mask)  # the own rows are the group
    with torch.no_grad():
        both = torch.stack([layer.moving_mean.value.detach(), layer.moving_variance.value.detach()])
        mean, variance = mirrored_calls.all_sum(both, rows) / rows.count
        layer.moving_mean.assign(mean)
        layer.moving_variance.assign(variance)
    return output
