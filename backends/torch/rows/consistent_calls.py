"""Layers of the consistent view that may compute on plain tensors: those that act row by row with whole weights.

DTensor costs some 20 microseconds for each operator, so a layer that needs no communication inside runs on this rank's
rows and hands back DTensors. Recurrent layers with split weights gather them once, instead of communicating at each
time step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from keras_flow.backends import leaves
from keras_flow.backends.row_wise import row_interaction
from keras_flow.backends.torch import data, gathered_weights, layouts, local_tensors, short_calls, variables
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing
from keras_flow.current.keras_places import in_stateless_scope

if TYPE_CHECKING:
    import keras


def can_run(layer: keras.Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the layer acts row by row, its inputs are split by rows at most, and its weights are whole."""
    # `stateless_call` gives the values of variables, which would hide the plain ones
    if not layer.built or in_stateless_scope() or row_interaction.of_call(layer, args, kwargs) is not None:
        return False
    # may gather its inputs and weights first: a collective for each time step costs more
    is_recurrent = row_interaction.is_recurrent(layer)
    if layout_of(args, kwargs) is None and not (is_recurrent and _can_lie_by_rows(args, kwargs)):
        return False
    # who replaced `call` (`dist.verify` notes the inputs) expects all rows; `remat` runs a layer again in the backward
    # pass, when its weights are no longer plain; and those are views, which autograd must not see written
    if any(
        "call" in vars(part) or part._remat_mode is not None or row_interaction.assigns_weights(part)
        for part in layer._flatten_layers()
    ):
        return False
    if any(not isinstance(variable._value, DTensor) for variable in layer.trainable_variables):
        return False  # of preprocessing (STFTSpectrogram): the sum of their gradients is over a DTensor's axes
    return is_recurrent or not any(
        part.is_shard()
        for variable in layer.variables
        if isinstance(variable._value, DTensor)
        for part in gathered_weights.placements_of_use(variable)
    )


def call(
    original: Callable[..., object],
    step: RunningStep,
    layer: keras.Layer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run the layer on this rank's rows."""
    if row_interaction.is_recurrent(layer):
        args, kwargs = _by_rows(args, kwargs)
    layout = layout_of(args, kwargs)
    assert layout is not None  # `can_run` checked it
    mesh, placements, _ = layout
    rows = rows_of(*layout)
    args, kwargs = data.map_call(to_local, args, kwargs)
    with computing(step, rows), plain_weights(layer, placements):
        outputs = short_calls.call(original, layer, args, kwargs)
    return leaves.mapped(lambda leaf: _from_local(leaf, mesh, placements, rows.count), outputs)


def _can_lie_by_rows(args: object, kwargs: object) -> bool:
    """Whether the tensors among the inputs are all DTensors with the same rows."""
    tensors = [leaf for leaf in leaves.flat((args, kwargs)) if len(getattr(leaf, "shape", ()))]
    return all(isinstance(leaf, DTensor) for leaf in tensors) and len({leaf.shape[0] for leaf in tensors}) == 1


def _by_rows(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """The inputs, split by rows at most, all in the way of the first."""
    first = next((leaf for leaf in leaves.flat((args, kwargs)) if isinstance(leaf, DTensor)), None)
    if first is None:
        return args, kwargs
    # a split of features is gathered, since the layer computes on plain tensors
    placements = tuple(part if part == Shard(0) else Replicate() for part in first.placements)

    def by_rows(leaf: object) -> object:
        if not isinstance(leaf, DTensor) or not leaf.ndim or leaf.placements == placements:
            return leaf
        return leaves.with_mask_of(leaf, leaf.redistribute(leaf.device_mesh, placements))

    return data.map_call(by_rows, args, kwargs)


def by_rows_again(outputs: object, inputs: object) -> object:
    """The outputs of a layer that mixes rows, split by rows where its inputs were: what follows is for own rows again.

    An operator without a proven rule computes all rows on every rank. Each keeps its own, without communication.
    """
    split = next(
        (leaf for leaf in leaves.flat(inputs) if isinstance(leaf, DTensor) and Shard(0) in leaf.placements), None
    )
    if split is None:
        return outputs
    mesh, rows = split.device_mesh, split.shape[0]
    placements = tuple(part if part == Shard(0) else Replicate() for part in split.placements)

    def own(leaf: object) -> object:
        if (
            not isinstance(leaf, DTensor)
            or leaf.shape[:1] != (rows,)
            or not all(p.is_replicate() for p in leaf.placements)
        ):
            return leaf
        return leaves.with_mask_of(leaf, leaf.redistribute(mesh, placements), own)

    return leaves.mapped(own, outputs) if layouts.divides(split.shape, mesh, placements) else outputs


def layout_of(args: object, kwargs: object) -> tuple[DeviceMesh, layouts.TorchPlacements, int] | None:
    """The layout and the rows that all inputs share: split by rows, or not at all; None where they share none."""
    shared: tuple[DeviceMesh, layouts.TorchPlacements] | None = None
    plain, rows = False, None
    for leaf in leaves.flat((args, kwargs)):
        if isinstance(leaf, DTensor):
            # one number for all rows, such as an index; its gradient would be a sum over them
            if not leaf.ndim and not leaf.requires_grad and all(part.is_replicate() for part in leaf.placements):
                continue
            # partial sums and splits of features would need communication inside
            if not leaf.ndim or any(
                part.is_partial() or (part.is_shard() and part != Shard(0)) for part in leaf.placements
            ):
                return None
            if shared is not None and (shared[1] != leaf.placements or rows != leaf.shape[0]):
                return None
            shared, rows = (leaf.device_mesh, leaf.placements), leaf.shape[0]
        elif hasattr(leaf, "shape") and len(leaf.shape):
            plain = True
    if shared is None or (plain and any(part.is_shard() for part in shared[1])):
        return None
    if rows is None or rows % rows_of(*shared, rows).count:
        return None
    return *shared, rows


@functools.lru_cache(maxsize=256)  # data may have any number of rows
def rows_of(mesh: DeviceMesh, placements: layouts.TorchPlacements, rows: int) -> OwnRows:
    """Which rows this rank has of a tensor that is split by rows at most."""
    count, index, groups, axes = 1, 0, [], []
    for axis, part in enumerate(placements):
        if part.is_shard():
            size = mesh.size(axis)
            count, index = count * size, index * size + mesh.get_local_rank(axis)
            groups.append(mesh.get_group(axis))
            axes.append(axis)
    return OwnRows(rows, count, index, tuple(groups), tuple(axes))


def to_local(leaf: object, grad_placements: layouts.TorchPlacements | None = None) -> object:
    """This rank's rows of a DTensor, with their mask; anything else as it is.

    `grad_placements`: the layout of the gradients of the ranks' rows, where it is not that of the rows.
    """
    if not isinstance(leaf, DTensor):
        return leaf

    def alike(mask: object) -> object:
        # a mask of another layout would have other rows than the tensor
        if isinstance(mask, DTensor) and mask.placements != leaf.placements:
            mask = mask.redistribute(mask.device_mesh, leaf.placements)
        return to_local(mask)

    return leaves.with_mask_of(leaf, local_tensors.to_local(leaf, grad_placements), alike)


def _from_local(leaf: object, mesh: DeviceMesh, placements: layouts.TorchPlacements, count: int) -> object:
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
        return leaf
    whole = local_tensors.from_local(leaf.contiguous(), (leaf.shape[0] * count, *leaf.shape[1:]), mesh, placements)
    return leaves.with_mask_of(leaf, whole, lambda mask: _from_local(mask, mesh, placements, count))


@contextlib.contextmanager
def plain_weights(layer: keras.Layer, placements: layouts.TorchPlacements | None = None) -> Iterator[None]:
    """Weights as whole plain tensors, which are in autograd's sight.

    Args:
        layer: the layer that has them.
        placements: how rows are split, over whose axes gradients are sums; None where every rank computes all rows.
    """
    at_once = row_interaction.is_recurrent(layer)
    sums = placements and tuple(Partial() if part.is_shard() else Replicate() for part in placements)
    plain, gathered = [], []
    for variable in layer.variables:
        value = variable._value
        # what is gathered for its use is so when it is read; a recurrent layer reads it at each time step
        if not isinstance(value, DTensor) or (placements and gathered_weights.is_held_split(variable) and not at_once):
            continue
        is_split = any(part.is_shard() for part in value.placements)
        if is_split:
            value = value.redistribute(value.device_mesh, layouts.replicated(value.device_mesh))
        # of weights that are not trained it is their own memory, so that assignments reach the variable
        local = local_tensors.to_local(value, sums)
        plain.append((variable, local))
        if is_split and not variable.trainable:
            gathered.append((variable, local, local._version))
    with variables.holding(plain):
        yield
    for variable, local, version in gathered:
        if local._version != version:  # it was assigned
            variable.assign(local)
