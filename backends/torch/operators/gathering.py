"""Whole tensors, below autograd: what the handlers of single operators gather."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import layouts


def whole(value: Any) -> Any:
    """The logical tensor of a DTensor, in the order of memory that the program sees; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    full = value.redistribute(value.device_mesh, layouts.replicated(value.device_mesh)).to_local()
    if full.stride() == value.stride() or 0 in value.stride():
        return full
    return torch.empty_strided(full.shape, value.stride(), dtype=full.dtype, device=full.device).copy_(full)


def replicated(value: Any, mesh: DeviceMesh) -> Any:
    """A DTensor that every rank holds whole."""
    if not isinstance(value, torch.Tensor):
        return value
    return DTensor.from_local(value, mesh, layouts.replicated(mesh), run_check=False)


def as_dtensor(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor as a DTensor: a plain one of a step is what every rank holds whole."""
    return value if isinstance(value, DTensor) else replicated(value, mesh)
