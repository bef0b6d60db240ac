"""`kf.to_global`: a global tensor of the shards that the processes have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Broadcast, NdSbp, SbpSpec, Split
from keras_flow.tensors.dtypes import default_of_array, numpy_dtype
from keras_flow.tensors.global_tensor import GlobalTensor, change_layout
from keras_flow.tensors.ranks import check_placement, local_ranks


def to_global(local: object, placement: Placement, sbp: SbpSpec) -> GlobalTensor:
    """A global tensor of what each process has: S takes shards, B copies of one value, P summands.

    Args:
        local: where this process drives one rank, its array; else rank -> array, for the ranks that it drives. A rank
            outside the placement gives an empty array, or none. Numpy's 64 bits become fewer as in `kf.tensor`; the
            engine's own arrays keep their dtype. To the engine's own gradients it is a constant.
        placement: ranks.
        sbp: how the shards make up the logical tensor. With B the value of the first rank of each axis counts.

    Raises:
        FlowError: dtypes differ, shards are not those of a balanced split, a rank's shard is missing.

    Example:
        >>> import keras_flow as kf
        >>> kf.to_global({0: [1, 2], 1: [3]}, kf.Placement([0, 1]), "S(0)").numpy()
        array([1, 2, 3], dtype=int32)
    """
    check_placement(placement)
    arrays = _arrays_of_ranks(local, placement)
    facts = tensor_engine().agree_on(
        {
            rank: (tuple(int(n) for n in value.shape), keras.backend.standardize_dtype(value.dtype))
            for rank, value in arrays.items()
        }
    )
    facts = {rank: fact for rank, fact in facts.items() if placement.contains(rank)}
    nd_sbp = _sbp.nd_sbp(sbp, placement.axis_names)
    layout = _layout_of_shards(placement, nd_sbp, {rank: shape for rank, (shape, _) in facts.items()})
    dtypes = {dtype: rank for rank, (_, dtype) in facts.items()}
    if len(dtypes) > 1:
        named = ", ".join(f"{dtype} on rank {rank}" for dtype, rank in dtypes.items())
        raise FlowError(f"kf.to_global: shards of different dtypes: {named}. Cast them first")
    return _with_equal_copies(GlobalTensor(layout, next(iter(dtypes)), arrays))


def _arrays_of_ranks(local: object, placement: Placement) -> dict[int, Any]:
    """Rank -> the engine's array, for the ranks of this process that the placement has."""
    here = local_ranks()
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
        if isinstance(value, keras.Variable):
            value = value.value
        # values of the host take the dtypes of `kf.tensor`, in a copy, which numpy's `put` makes none of; arrays of the
        # engine keep theirs
        if isinstance(value, (np.ndarray, np.generic, list, tuple, float, int)):
            array = np.asarray(value)
            value = tensor_engine().put(array.astype(numpy_dtype(default_of_array(array))), rank)
        with tensor_engine().on_rank(rank):
            arrays[rank] = tensor_engine().without_gradient(value)
    return arrays


def _layout_of_shards(placement: Placement, nd_sbp: NdSbp, shapes: Mapping[int, tuple[int, ...]]) -> Layout:
    """The layout whose shards have these shapes: a split dim is as long as the blocks along its axes together."""
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
            # one line of ranks along the axes of the split: ranks beside it hold the same blocks
            others = [axis for axis in range(placement.ndim) if axis not in axes]
            line = [rank for rank in placement.ranks if all(placement.coordinates(rank)[axis] == 0 for axis in others)]
            logical[dim] = sum(shapes[rank][dim] for rank in line)
    layout = Layout(placement, nd_sbp, logical)
    for rank, shape in shapes.items():
        # checked for all ranks, since every process knows all shapes, so that all raise
        if shape != layout.local_shape(rank):
            raise FlowError(
                f"kf.to_global: rank {rank} has a shard {list(shape)}; in a balanced split of {logical} as "
                f"({_sbp.text(nd_sbp)}) it has {list(layout.local_shape(rank))}"
            )
    return layout


def _with_equal_copies(tensor: GlobalTensor) -> GlobalTensor:
    """Give the ranks of B axes the value of the axis' first rank: a layout promises that copies are equal.

    What the callers gave may differ in the last bit, or altogether, so the others are boxed from the first ranks.
    """
    axes = [axis for axis, part in enumerate(tensor.sbp) if isinstance(part, Broadcast)]
    placement = tensor.placement
    first = np.asarray(placement.ranks).reshape(placement.hierarchy)[
        tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(placement.ndim))
    ]
    if first.size == placement.size:
        return tensor
    source = Placement(first, placement.axis_names, placement.type)
    kept = {rank: value for rank, value in tensor._shards.items() if source.contains(rank)}
    return change_layout(GlobalTensor(Layout(source, tensor.sbp, tensor.shape), tensor.dtype, kept), tensor.layout)
