"""Attention on a CPU: each rank computes its own rows, or its own heads.

torch has no sharding rule for these operators. A rule of ours would not do, since the mask is a keyword argument: torch
does not change the layout of keyword arguments as a rule asks, and remembers its decisions without them. A mask in
another layout than the queries, such as one that a program makes for all rows, was then used with a part of the rows
("shape '[1, 1, 10, 10]' is invalid for input of size 800").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from keras_flow.backends.hooking import Hook, declared, hook
from keras_flow.backends.torch import layouts, local_tensors
from keras_flow.backends.torch.operators.gathering import as_dtensor
from keras_flow.current import keras_places
from keras_flow.current.distribution import active

#: dims of `[batch, length, heads, features]`, as Keras has them
_ROWS, _HEADS = 0, 2
aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def hooks() -> tuple[Hook, ...]:
    """The hook on Keras's own attention; none before Keras 3.16, which computes it on the ranks' pieces."""
    if not hasattr(keras_places.find("keras:nn"), "DTensor"):
        return ()
    return declared(sys.modules[__name__])


def split_query(query: object, *args: object, **kwargs: object) -> DTensor | None:
    """Condition of the hook: a query that is a DTensor, in a step of ours."""
    return query if isinstance(query, DTensor) and active() is not None else None


@hook(
    "keras:nn",
    "dot_product_attention",
    "Keras computes on the pieces of query, key, value and mask, which may have other layouts than the query",
    when=split_query,
)
def as_the_query(
    laid: DTensor,
    original: Callable[..., torch.Tensor],
    query: DTensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Hook on `nn.dot_product_attention`: all operands get the layout of the query, where it splits rows or heads.

    Args:
        query: `[batch, length, heads, features]`, as are key and value; these may have fewer heads, which groups of its
            heads share.
        bias: `[batch or 1, heads or 1, length, length]`, added to the scores.
        mask: has the same shape, and is true where a score counts.
    """
    mesh = laid.device_mesh
    can_split = (Shard(_ROWS), Shard(_HEADS)) if key.shape[_HEADS] == query.shape[_HEADS] else (Shard(_ROWS),)
    wanted: tuple[Placement, ...] = tuple(part if part in can_split else Replicate() for part in query.placements)
    if not layouts.divides(query.shape, mesh, wanted):
        wanted = layouts.replicated(mesh)

    def of_scores(scores: torch.Tensor | None) -> DTensor | None:
        if scores is None:
            return None
        lengths = {_ROWS: (0, query.shape[_ROWS]), _HEADS: (1, query.shape[_HEADS])}
        parts: list[Placement] = []
        for part in wanted:
            dim, length = lengths[part.dim] if isinstance(part, Shard) else (0, 0)
            is_split = isinstance(part, Shard) and scores.ndim == 4 and scores.shape[dim] == length
            parts.append(Shard(dim) if is_split else Replicate())
        return as_dtensor(scores, mesh).redistribute(mesh, parts)

    query, key, value = (as_dtensor(each, mesh).redistribute(mesh, wanted) for each in (query, key, value))
    return original(query, key, value, bias=of_scores(bias), mask=of_scores(mask), **kwargs)


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
