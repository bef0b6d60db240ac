"""Attention on a CPU: each rank computes its own rows, or its own heads.

torch has no rule for the operators. A rule of ours would not do: the mask is a keyword argument, which torch neither
moves to where a rule wants it, nor remembers decisions by. A mask that lies otherwise than the queries, such as one
that a program makes for all rows, met a part of them ("shape '[1, 1, 10, 10]' is invalid for input of size 800").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from keras_flow.backends.torch import local_tensors
from keras_flow.backends.torch.gathering import as_dtensor

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def handlers() -> dict[torch._ops.OpOverload, Callable[..., object]]:
    """Handlers of attention and its gradient."""
    return {_FORWARD: attend, _BACKWARD: attend}


def attend(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of `(query, key, value, ...)` and of `(gradient, query, key, value, output, logsumexp, ...)`.

    Tensors are `[batch, heads, length, features]`. They all take the layout of the query, as far as that splits the
    batch or the heads.
    """
    mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
    query = as_dtensor(args[1 if operator is _BACKWARD else 0], mesh)
    placements = [part if part in (Shard(0), Shard(1)) else Replicate() for part in query.placements]

    def local(value: object, name: str = "") -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # a mask [1, 1, t, t] is for all rows and heads, and one [t, t], too
        is_mask = name == "attn_mask"
        wanted = [_of_mask(part, value) for part in placements] if is_mask else placements
        return as_dtensor(value, mesh).redistribute(mesh, wanted)._local_tensor

    results = operator(*map(local, args), **{name: local(value, name) for name, value in kwargs.items()})
    return tuple(
        local_tensors.from_local(result, (*query.shape[:2], *result.shape[2:]), mesh, tuple(placements))
        for result in results
    )


def _of_mask(part: Placement, mask: torch.Tensor) -> Placement:
    splits = isinstance(part, Shard) and mask.ndim == 4 and mask.shape[part.dim] != 1
    return part if splits else Replicate()
