"""DTensor's changes of layout, by keras_flow's boxing plans.

DTensor changes one axis of the mesh after the other, and on CPU gathers the tensor where a dim is split anew. All of
its changes, those that an operator asks of its inputs too, go through one function; under a distribution a plan runs
there instead, which receives the fewest bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from keras_flow.backends.hooking import hook
from keras_flow.backends.torch import boxing, layouts
from keras_flow.backends.torch.devices import world
from keras_flow.boxing import BoxingPlan, plan
from keras_flow.layout import Layout
from keras_flow.placements import Placement


@hook(
    "torch.distributed.tensor._redistribute",
    "redistribute_local_tensor",
    "layouts change by keras_flow's plans; DTensor moves more bytes, and on CPU gathers to split another dim",
    also=(
        "torch.distributed.tensor._dispatch:redistribute_local_tensor",
        "torch.distributed.tensor._api:redistribute_local_tensor",
    ),
)
def redistribute_local_tensor(
    _: object,
    original: Callable[..., torch.Tensor],
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    **options: object,
) -> torch.Tensor:
    """Hook on `redistribute_local_tensor` of DTensor: this rank's shard in the layout `target`, by a plan.

    By DTensor itself where there is no plan for such layouts.
    """
    boxing_plan = _plan(current, target, str(local.dtype).removeprefix("torch."))
    if boxing_plan is None:
        return original(local, current, target, **options)
    # a collective of DTensor's own may still be on its way
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    rank = world().local_ranks[0]
    return _in_order(boxing.redistribute(boxing_plan, {rank: local})[rank], current)


def _in_order(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """In the order of memory that DTensor says the tensor has: it allows views by it."""
    assert spec.tensor_meta is not None
    strides = spec.tensor_meta.stride
    if list(strides) == sorted(strides, reverse=True):
        return local.contiguous()
    order = sorted(range(local.ndim), key=lambda dim: -strides[dim])
    return local.permute(order).contiguous().permute([order.index(dim) for dim in range(local.ndim)])


@functools.lru_cache(maxsize=4096)
def _plan(current: DTensorSpec, target: DTensorSpec, dtype: str) -> BoxingPlan | None:
    """The plan between two layouts, or None where there is none.

    There is none where a layout splits unevenly, which DTensor does in another way, reduces by something else than a
    sum, or leaves out ranks of the world.
    """
    if current.mesh != target.mesh or current.mesh.size() != world().size or current.tensor_meta is None:
        return None
    # the mesh in its own order of ranks: [[3, 1], [0, 2]] is another placement than [[0, 1], [2, 3]]
    placement = Placement(current.mesh.mesh.tolist())
    described: list[Layout] = []
    for spec in (current, target):
        parts = [layouts.to_sbp(part) for part in spec.placements]
        plain_order = DTensorSpec.compute_default_shard_order(spec.placements)
        if None in parts or spec.shard_order not in (None, plain_order):
            return None
        described.append(Layout(placement, tuple(parts), tuple(current.tensor_meta.shape)))  # type: ignore[arg-type]
    before, after = described
    # 5 rows over 4 ranks: keras_flow's blocks are 2, 1, 1, 1, DTensor's 2, 2, 1, 0
    return plan(before, after, dtype) if before.divides and after.divides else None
