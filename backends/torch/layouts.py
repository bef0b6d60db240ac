"""Layouts as DTensor has them: meshes, placements, process groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as torch_distributed
from keras import tree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from keras_flow import sbp
from keras_flow.backends import leaves
from keras_flow.backends.rendezvous import agreement
from keras_flow.backends.torch import devices
from keras_flow.current import joining
from keras_flow.current.distribution import check_activation, expected
from keras_flow.layout import Layout
from keras_flow.placements import Placement

TorchPlacements = tuple[TorchPlacement, ...]

#: ranks -> their process group, in the order in which they were made
_groups: dict[tuple[int, ...], torch_distributed.ProcessGroup] = {}


def mesh(placement: Placement) -> DeviceMesh:
    """The DTensor mesh of a placement. The first call is a collective of the whole job: it makes process groups."""
    devices.world().require_real("a DTensor")
    return _mesh(placement, placement.axis_names)


@functools.cache
def _mesh(placement: Placement, names: tuple[str, ...]) -> DeviceMesh:
    """Names are a key of their own: equal placements may have others."""
    ranks = torch.tensor(placement.ranks, dtype=torch.int).reshape(placement.hierarchy)
    kind = "cuda" if devices.world().type == "gpu" else "cpu"
    if not has_peers() or not is_member(placement):
        bare = DeviceMesh(kind, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
        if has_peers():
            for axis in range(ranks.ndim):
                _axis_group(ranks, axis)
        return bare
    # DeviceMesh itself makes groups that count by rank, so that a gather on ranks [3, 1] would have another order
    groups = [_axis_group(ranks, axis) for axis in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)  # type: ignore[arg-type]


def _axis_group(ranks: torch.Tensor, axis: int) -> torch_distributed.ProcessGroup | None:
    """Make the groups of all lines along an axis; returns the one of this process's rank."""
    mine = None
    for line in ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist():
        created = group(tuple(line))
        if this_rank() in line:
            mine = created
    return mine


def group(ranks: tuple[int, ...]) -> torch_distributed.ProcessGroup:
    """The process group of these ranks, in this order. The first call is a collective of the whole job."""
    if ranks not in _groups:
        if _are_all(ranks):
            _groups[ranks] = torch_distributed.distributed_c10d._get_default_group()
        else:
            created = torch_distributed.new_group(
                list(ranks), timeout=timedelta(seconds=joining.waiting_seconds()), sort_ranks=False
            )
            _groups[ranks] = cast(torch_distributed.ProcessGroup, created)
    return _groups[ranks]


def make_groups_again() -> bool:
    """Make all groups again, after the job's own was made anew; False where ranks had made different ones.

    In the old order they get the old names, by which meshes, and so DTensors, look them up.
    """
    # that of all ranks is the job's own, which a rank may have asked for alone
    known = [ranks for ranks in _groups if not _are_all(ranks)]
    _groups.clear()
    if agreement.differ({"groups": known}):
        return False
    for ranks in known:
        group(ranks)
    return True


def _are_all(ranks: tuple[int, ...]) -> bool:
    return ranks == tuple(range(devices.world().size))


def has_peers() -> bool:
    """Whether the job has other ranks."""
    return torch_distributed.is_initialized()


def this_rank() -> int:
    """The rank of this process."""
    return devices.world().local_ranks[0]


def is_member(placement: Placement) -> bool:
    """Whether this process's rank belongs to the placement. One that does not computes everything whole, alone."""
    return this_rank() in placement.ranks


def distributed(placement: Placement) -> bool:
    """Whether there is anything to share: several ranks, this process's among them."""
    return len(placement.ranks) > 1 and is_member(placement)


def engine_layout(layout: Layout) -> TorchPlacements:
    """DTensor placements, one for each axis of the placement."""
    return to_placements(layout.nd_sbp)


def to_sbp(part: TorchPlacement) -> sbp.Sbp | None:
    """The sbp of one DTensor placement; None where there is none (another reduction than a sum, a strided shard)."""
    if type(part) is Shard:
        return sbp.split(part.dim)
    if type(part) is Partial and part.reduce_op == "sum":
        return sbp.partial_sum
    return sbp.broadcast if type(part) is Replicate else None


def to_placements(nd_sbp: sbp.NdSbp) -> TorchPlacements:
    """DTensor placements of an nd_sbp."""
    return tuple(
        Shard(part.dim) if isinstance(part, sbp.Split) else Partial() if part == sbp.partial_sum else Replicate()
        for part in nd_sbp
    )


def replicated(device_mesh: DeviceMesh) -> TorchPlacements:
    """Every rank holds the whole tensor."""
    return (Replicate(),) * device_mesh.ndim


def without_sums(placements: TorchPlacements) -> TorchPlacements:
    """The layout of a tensor of which some axes have the sum: whole along these."""
    return tuple(Replicate() if part.is_partial() else part for part in placements)


def local_slices(shape: Sequence[int], device_mesh: DeviceMesh, placements: TorchPlacements) -> tuple[slice, ...]:
    """The logical elements that this rank holds."""
    lengths, offsets = compute_local_shape_and_global_offset(torch.Size(shape), device_mesh, placements)
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def divides(shape: Sequence[int], device_mesh: DeviceMesh, placements: TorchPlacements) -> bool:
    """Whether all ranks hold parts of one size."""
    parts = [1] * len(shape)
    for axis, part in enumerate(placements):
        if part.is_shard():
            parts[part.dim] *= device_mesh.size(axis)  # type: ignore[attr-defined]
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))


def constrain(outputs: object, nd_sbp: sbp.NdSbp, path: str) -> object:
    """Lay the tensors of a layer's output; a dimension that does not divide stays whole on that axis."""
    placement = expected().placement

    def constrained(leaf: object) -> object:
        shape = getattr(leaf, "shape", None)
        # a layer may return numbers or None beside its tensors
        if shape is None:
            return leaf
        check_activation(placement, nd_sbp, shape, path)
        return _constrained(leaf, to_placements(nd_sbp)) if isinstance(leaf, DTensor) else leaf

    return tree.map_structure(constrained, outputs)


def _constrained(leaf: DTensor, wanted: TorchPlacements) -> DTensor:
    shape = leaf.shape
    parts, placements = [1] * len(shape), []
    for axis, part in enumerate(wanted):
        if isinstance(part, Shard):
            dim = part.dim % len(shape)
            # two axes may split one dim: their product must divide it
            parts[dim] *= leaf.device_mesh.size(axis)
            if shape[dim] % parts[dim]:
                parts[dim] //= leaf.device_mesh.size(axis)
                part = Replicate()
            else:
                part = Shard(dim)
        placements.append(part)
    # the usual case, which costs no collective and keeps the tensor's mask
    if tuple(placements) == leaf.placements:
        return leaf
    return leaves.with_mask_of(leaf, leaf.redistribute(leaf.device_mesh, placements))
