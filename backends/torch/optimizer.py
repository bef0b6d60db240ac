"""Gradients on PyTorch: summed over the ranks before the optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_distributed
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import layouts
from keras_flow.backends.torch.step import implicit_replication

if TYPE_CHECKING:
    import keras


def holds_dtensors(
    optimizer: object, grads: Sequence[object], trainable_variables: Sequence[keras.Variable] | None = None
) -> bool:
    """The hook's condition: gradients or variables are DTensors."""
    held = trainable_variables if trainable_variables is not None else getattr(optimizer, "_trainable_variables", ())
    return any(isinstance(grad, DTensor) for grad in grads) or any(isinstance(v._value, DTensor) for v in held)


def apply(
    original: Callable[..., object],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[torch.Tensor | None],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> object:
    """Hook: reduce what the backward pass left partial, then update."""
    held = list(trainable_variables if trainable_variables is not None else optimizer._trainable_variables)
    with implicit_replication(), torch.no_grad():
        return original(optimizer, reduce(list(grads), held), trainable_variables)


def reduce(grads: Sequence[torch.Tensor | None], variables: Sequence[keras.Variable]) -> list[torch.Tensor | None]:
    """Lay each gradient as its variable. Sums over the same axes travel together, in one all-reduce for each dtype."""
    out = list(grads)
    together: dict[tuple[object, ...], list[int]] = {}
    for index, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        held = variable._value
        if not isinstance(held, DTensor) or grad is None:
            continue
        if not isinstance(grad, DTensor):
            out[index] = layouts.from_full(grad, held.device_mesh, held.placements)
            continue
        if grad.placements == held.placements:
            continue
        differ = tuple(axis for axis, part in enumerate(grad.placements) if part != held.placements[axis])
        if all(_is_sum(grad.placements[axis]) and held.placements[axis].is_replicate() for axis in differ):
            together.setdefault((differ, grad.dtype, held.device_mesh), []).append(index)
        else:
            out[index] = grad.redistribute(held.device_mesh, held.placements)
    for (differ, _, mesh), indices in together.items():
        pieces = [out[index].to_local() for index in indices]  # type: ignore[union-attr]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        for axis in differ:  # type: ignore[attr-defined]
            torch_distributed.all_reduce(flat, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        for index, piece, summed in zip(indices, pieces, flat.split([p.numel() for p in pieces]), strict=True):
            held = variables[index]._value
            out[index] = layouts.from_local(summed.view(piece.shape), held.shape, mesh, held.placements)  # type: ignore[arg-type]
    return out


def _is_sum(part: object) -> bool:
    return part.is_partial() and part.reduce_op == "sum"  # type: ignore[attr-defined]
