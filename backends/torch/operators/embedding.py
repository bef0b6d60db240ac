"""Looking up rows of a table whose rows are split: each rank looks up its own, and the ranks' results are summed.

DTensor keeps a mask of the foreign rows beside such a sum, which is gone when the sum is read a second time, and has
another shape than the sum where the table is split along both dims ("The shape of the mask ... does not match").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from keras_flow.backends.torch import layouts, local_tensors
from keras_flow.backends.torch.operators.gathering import as_dtensor


def look_up(operator: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of `embedding(table, indices)`: each axis of the mesh splits the indices, or the rows, or the columns."""
    table, indices, *_ = args
    mesh = (table if isinstance(table, DTensor) else indices).device_mesh
    table, indices = as_dtensor(table, mesh), as_dtensor(indices, mesh)
    of_table, of_indices, of_result = zip(
        *map(_along_axis, table.placements, indices.placements, [indices.ndim] * mesh.ndim), strict=True
    )
    # uneven shards are looked up whole: a rank's first row is then not `index * rows`
    if not layouts.divides(table.shape, mesh, of_table) or not layouts.divides(indices.shape, mesh, of_indices):
        of_table = of_indices = of_result = layouts.replicated(mesh)
    local_table = table.redistribute(mesh, of_table)._local_tensor
    local_indices = indices.redistribute(mesh, of_indices)._local_tensor
    first = layouts.local_slices(table.shape, mesh, of_table)[0].start
    if any(part == Shard(0) for part in of_table):
        rows = local_indices - first
        if indices.device.type == "cpu" and bool(((local_indices < 0) | (local_indices >= table.shape[0])).any()):
            raise IndexError("index out of range in self")  # as torch says it of a whole table
        # an index of another rank's row looks up row 0 here, and its result is set to zero
        own = (rows >= 0) & (rows < len(local_table))
        local = torch.where(own.unsqueeze(-1), operator(local_table, rows * own), 0)
    else:
        local = operator(local_table, local_indices)
    return local_tensors.from_local(local, (*indices.shape, *table.shape[1:]), mesh, of_result)


def _along_axis(table: Placement, indices: Placement, columns: int) -> tuple[Placement, Placement, Placement]:
    """Placements of table, indices and result. Indices that are split stay so: theirs are the rows of the batch."""
    if isinstance(indices, Shard):
        return Replicate(), indices, indices
    if table == Shard(0):
        return table, Replicate(), Partial()
    if table == Shard(1):
        return table, Replicate(), Shard(columns)
    return Replicate(), Replicate(), Replicate()
