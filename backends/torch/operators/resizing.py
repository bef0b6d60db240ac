"""Resizing of pictures (`UpSampling2D(interpolation="bilinear")`, `ops.image.resize`) on DTensors.

DTensor has no rules for these operators, and a rule would not do: their gradients are told the size of the picture's
batch, which is another on each rank. Each picture and channel is resized alone, so a rank resizes those that it holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

#: dims of a picture -> the operators that resize it; each has a gradient of its own, `NAME_backward`
_OPERATORS = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "_upsample_lanczos2d_aa",
    ),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}


def handlers() -> Iterator[tuple[torch._ops.OpOverload, Callable[..., object]]]:
    """A handler for each operator and its gradient."""
    for dims, names in _OPERATORS.items():
        for name in names:
            yield getattr(aten, name).default, functools.partial(_resize, dims)
            yield getattr(aten, f"{name}_backward").default, _gradient


def _resize(dims: int, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The pictures [rows, channels, *size] that this rank holds, in their new size."""
    pictures, size, *rest = args
    pictures = _by_pictures(pictures)
    resized = operator(pictures._local_tensor, size, *rest, **kwargs)
    return _like(pictures, resized, [*pictures.shape[:-dims], *size])


def _gradient(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The gradient of the pictures that this rank holds."""
    grad, size, shape, *rest = args
    grad = _by_pictures(grad)
    # the shape that is asked for is the logical one; this rank has some of its rows and channels
    local = grad._local_tensor
    return _like(grad, operator(local, size, [*local.shape[:2], *shape[2:]], *rest, **kwargs), shape)


def _by_pictures(value: DTensor) -> DTensor:
    """Split by rows and channels alone, and evenly. Summands stay: what resizes a sum resizes its summands."""
    sizes = [
        math.prod(value.device_mesh.size(axis) for axis, part in enumerate(value.placements) if part.is_shard(dim))
        for dim in range(2)
    ]
    placements = [
        Replicate() if part.is_shard() and (part.dim > 1 or value.shape[part.dim] % sizes[part.dim]) else part  # type: ignore[attr-defined]
        for part in value.placements
    ]
    return value if tuple(placements) == value.placements else value.redistribute(value.device_mesh, placements)


def _like(value: DTensor, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
    """A tensor of another shape that is split as `value` is."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    spec = DTensorSpec(value.device_mesh, value.placements, tensor_meta=meta)
    return DTensor(local.contiguous(), spec, requires_grad=False)
