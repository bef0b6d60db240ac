"""Plain tensors become DTensors and back, as torch does it, at a third of the time.

DTensor's own ways describe the layout anew with each tensor and its gradient. A layer does both for its inputs, outputs
and weights, in steps that repeat, so descriptions are made once for a shape and kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # private: what a DTensor is made of
from torch.distributed.tensor._utils import compute_global_tensor_info

from keras_flow.backends.torch import doubling
from keras_flow.backends.torch.layouts import TorchPlacements, without_sums


def from_local(
    local: torch.Tensor, shape: Sequence[int], device_mesh: DeviceMesh, placements: TorchPlacements
) -> DTensor:
    """A DTensor of logical `shape` from this rank's piece, in the order of memory that the piece has.

    The piece's gradient has the layout of the DTensor; a partial sum's is whole, since each summand counts once.
    """
    order = None if local.is_contiguous() else (tuple(local.shape), local.stride())
    spec = _spec(device_mesh, placements, tuple(shape), local.dtype, order)
    if _is_recorded(local):
        return _FromLocal.apply(local, spec)
    return DTensor(local.detach(), spec, requires_grad=False)


def to_local(value: DTensor, grad_placements: TorchPlacements | None = None) -> torch.Tensor:
    """This rank's piece of a DTensor.

    Args:
        grad_placements: the layout that the gradients of the ranks' pieces have; as the DTensor's by default.
    """
    if not _is_recorded(value):
        return _arrived(value._local_tensor).detach()
    return _ToLocal.apply(value, grad_placements or without_sums(value.placements))


def summed(value: DTensor) -> DTensor:
    """A DTensor with the same value and no partial sums."""
    axes = [axis for axis, part in enumerate(value.placements) if part.is_partial()]
    if not axes:
        return value
    whole = without_sums(value.placements)
    # an all-reduce without DTensor's and the plan's ways to it; over several axes the plan makes one of them
    if value.placements[axes[0]] == Partial() and len(axes) == 1 and not _is_recorded(value):
        return from_local(_summed_over(value, axes[0]), value.shape, value.device_mesh, whole)
    return value.redistribute(value.device_mesh, whole)


def _summed_over(value: DTensor, axis: int) -> torch.Tensor:
    local = _arrived(value._local_tensor)
    if value.device_mesh.size(axis) > 1:
        local = local.clone(memory_format=torch.contiguous_format)
        doubling.all_reduce(local, value.device_mesh.get_group(axis))
    return local


def _arrived(local: torch.Tensor) -> torch.Tensor:
    # a collective of DTensor's own may still be on its way
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_recorded(value: torch.Tensor) -> bool:
    return value.requires_grad and torch.is_grad_enabled()


@functools.lru_cache(maxsize=4096)
def _spec(
    device_mesh: DeviceMesh,
    placements: TorchPlacements,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> DTensorSpec:
    """DTensor's description; `order`: shape and strides of the piece, where it is not contiguous."""
    if order is None:
        strides = torch.empty(shape, device="meta").stride()
    else:
        piece = torch.empty_strided(*order, device="meta")
        strides = tuple(compute_global_tensor_info(piece, device_mesh, placements)[1])
    return DTensorSpec(device_mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


# Each is differentiated by the other, so that gradients of gradients are right too.


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, spec):
        ctx.placements, ctx.own = without_sums(spec.placements), spec.placements
        ctx.set_materialize_grads(False)
        return DTensor(local.detach(), spec, requires_grad=True)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None
        if without_sums(grad.placements) == ctx.placements:
            grad = summed(grad)
        else:
            grad = grad.redistribute(grad.device_mesh, ctx.placements)
        # each summand has the whole gradient; what comes back through it is a summand again
        return to_local(grad, ctx.own), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, grad_placements):
        ctx.layout = tuple(value.shape), value.device_mesh, grad_placements
        ctx.set_materialize_grads(False)
        return _arrived(value._local_tensor).detach()

    @staticmethod
    def backward(ctx, grad):
        return (None if grad is None else from_local(grad, *ctx.layout)), None
