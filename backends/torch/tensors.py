"""Global tensors on torch: this process's shard; gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_flow import sbp
from keras_flow.backends.torch import layouts
from keras_flow.backends.torch.devices import rank_devices, world
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement


def put(value: np.ndarray, rank: int) -> torch.Tensor:
    """Put a value on the device of this rank."""
    device = rank_devices()[rank]
    # numpy's bfloat16 (ml_dtypes) is unknown to torch: by way of float32, which holds it exactly
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.astype("float32")).to(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(value)).to(device)


def as_numpy(value: torch.Tensor) -> np.ndarray:
    """The value; in the memory of the tensor, where that is the host's."""
    value, name = value.detach().cpu(), str(value.dtype).removeprefix("torch.")
    if hasattr(np, name):
        return value.numpy()
    import ml_dtypes

    # bfloat16 and float8, which NumPy knows by their bits alone
    return value.view(getattr(torch, f"uint{8 * value.itemsize}")).numpy().view(getattr(ml_dtypes, name))


def on_rank(rank: int) -> AbstractContextManager[object]:
    """A process drives one rank: nothing to choose."""
    return nullcontext()


def vjp(function: Callable[..., list], values: Sequence[Any]) -> tuple[list, Callable[..., list]]:
    """Use a graph of its own."""
    # a graph of its own: the values may be part of another one
    leaves = [value.detach().requires_grad_() for value in values]
    # what the program is called from may have switched autograd off
    with torch.enable_grad():
        results = function(*leaves)
    detached = [result.detach() for result in results]

    def pullback(*cotangents: torch.Tensor) -> list:
        used = [
            (result, cotangent) for result, cotangent in zip(results, cotangents, strict=True) if result.requires_grad
        ]
        gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if used:
            gradients = torch.autograd.grad(
                [result for result, _ in used], leaves, [given for _, given in used], allow_unused=True
            )
        return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, gradients, strict=True)]

    return detached, pullback


def to_engine(layout: Layout, shards: Mapping[int, torch.Tensor]) -> DTensor:
    """A DTensor with this rank's shard as its local tensor."""
    if not layout.divides:
        raise FlowError(f"a torch DTensor splits unevenly in another way: {layout}. Change the layout first")
    # a rank outside of the placement has no shard, and takes part all the same
    local = next(iter(shards.values()), None)
    if local is None:
        local = torch.empty(0, device=rank_devices()[world().local_ranks[0]])
    # those of a contiguous logical tensor: `from_local` would compute them from the shard
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        layouts.mesh(layout.placement),
        layouts.engine_layout(layout),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=stride,
    )


def from_engine(value: Any) -> tuple[Layout, dict[int, torch.Tensor]] | None:
    """The layout of a DTensor."""
    if not isinstance(value, DTensor):
        return None
    mesh = value.device_mesh
    placement = Placement(mesh.mesh.tolist(), mesh.mesh_dim_names)
    nd_sbp = [layouts.to_sbp(part) for part in value.placements]
    if None in nd_sbp:
        raise FlowError(
            f"this DTensor's placements are {list(value.placements)}; a global tensor's are Shard, Replicate and "
            'Partial with "sum". Redistribute it first'
        )
    layout = Layout(placement, cast("sbp.NdSbp", tuple(nd_sbp)), tuple(value.shape))
    rank = world().local_ranks[0]
    local = value.to_local().detach()  # autograd follows a variable that is trained
    # torch splits 5 rows over 4 ranks into 2, 2, 1 and 0; ours are 2, 1, 1 and 1
    if placement.contains(rank) and tuple(local.shape) != layout.local_shape(rank):
        raise FlowError(
            f"this DTensor's shards are not those of the balanced split: {layout}, found {list(local.shape)}"
        )
    return layout, {rank: local} if placement.contains(rank) else {}
