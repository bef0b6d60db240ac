"""Global tensors from what each process has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Broadcast, SbpSpec, Split
from keras_flow.tensors import engine
from keras_flow.tensors.global_tensor import GlobalTensor, relay


def join(local: Any, placement: Placement, sbp: SbpSpec) -> GlobalTensor:
    """See `kf.to_global`."""
    import keras

    from keras_flow.tensors.creation import dtype_of

    engine.check_placement(placement)
    here = engine.local_ranks()
    if isinstance(local, Mapping):
        shards = dict(local)
    elif len(here) == 1:
        shards = {here[0]: local}
    else:
        raise FlowError(f"this process drives ranks {list(here)}: give a shard for each, {{{here[0]}: ..., ...}}")
    mine = [rank for rank in here if placement.contains(rank)]
    missing = [rank for rank in mine if rank not in shards]
    if missing:
        raise FlowError(f"kf.to_global: no shard for ranks {missing}, which {placement} names")
    arrays = {}
    for rank in mine:
        value = shards[rank]
        if isinstance(value, (np.ndarray, np.generic, list, tuple, float, int)):
            array = np.asarray(value)
            value = engine.put(array.astype(engine.numpy_dtype(dtype_of(array)), copy=False), rank)
        arrays[rank] = value
    facts = engine.tensor_engine().agree_on(
        {
            rank: (tuple(int(n) for n in value.shape), keras.backend.standardize_dtype(value.dtype))
            for rank, value in arrays.items()
        }
    )
    facts = {rank: fact for rank, fact in facts.items() if placement.contains(rank)}
    nd_sbp = _sbp.nd_sbp(sbp, placement.axis_names)
    layout = _layout(placement, nd_sbp, {rank: shape for rank, (shape, _) in facts.items()})
    dtypes = {dtype: rank for rank, (_, dtype) in facts.items()}
    if len(dtypes) > 1:
        named = ", ".join(f"{dtype} on rank {rank}" for dtype, rank in dtypes.items())
        raise FlowError(f"kf.to_global: shards of different dtypes: {named}. Cast them first")
    made = GlobalTensor(layout, next(iter(dtypes)), arrays)
    return _first_counts(made)


def _layout(placement: Placement, nd_sbp: _sbp.NdSbp, shapes: Mapping[int, tuple[int, ...]]) -> Layout:
    """The layout whose shards have these shapes."""
    first = shapes[placement.ranks[0]]
    logical = list(first)
    for rank, shape in shapes.items():
        if len(shape) != len(first):
            raise FlowError(
                f"kf.to_global: shards of {len(first)} and {len(shape)} dims, on ranks {placement.ranks[0]} and {rank}"
            )
    for dim in range(len(first)):
        axes = [axis for axis, part in enumerate(nd_sbp) if isinstance(part, Split) and part.dim % len(first) == dim]
        if axes:
            others = [axis for axis in range(placement.ndim) if axis not in axes]
            line = [rank for rank in placement.ranks if all(placement.coordinates(rank)[axis] == 0 for axis in others)]
            logical[dim] = sum(shapes[rank][dim] for rank in line)
    layout = Layout(placement, nd_sbp, logical)
    for rank, shape in shapes.items():
        if shape != layout.local_shape(rank):
            raise FlowError(
                f"kf.to_global: rank {rank} has a shard {list(shape)}; in a balanced split of {logical} as "
                f"({_sbp.text(nd_sbp)}) it has {list(layout.local_shape(rank))}"
            )
    return layout


def _first_counts(tensor: GlobalTensor) -> GlobalTensor:
    """With B the first rank of the axis says the value; the others receive it."""
    axes = [axis for axis, part in enumerate(tensor.sbp) if isinstance(part, Broadcast)]
    placement = tensor.placement
    first = np.asarray(placement.ranks).reshape(placement.hierarchy)[
        tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(placement.ndim))
    ]
    if first.size == placement.size:
        return tensor
    source = Placement(first, placement.axis_names, placement.type)
    kept = {rank: value for rank, value in tensor._shards.items() if source.contains(rank)}
    return relay(GlobalTensor(Layout(source, tensor.sbp, tensor.shape), tensor.dtype, kept), tensor.layout)
