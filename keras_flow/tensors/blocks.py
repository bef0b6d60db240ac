"""Reductions of each rank's own block, kept as a tensor with one place for each block."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from keras_flow.layout import Layout
from keras_flow.sbp import Split
from keras_flow.tensors.global_tensor import GlobalTensor, summed
from keras_flow.tensors.running import on_ranks


def per_block(name: str, x: GlobalTensor, dims: Sequence[int]) -> GlobalTensor:
    """The maximum or minimum of each shard over `dims`: a split dim gets the length of its blocks, another one 1.

    Args:
        name: `"max"` or `"min"`.
        x: partial sums are summed first; where a rank holds nothing along a split dim, that becomes broadcast first.
        dims: from 0 up.
    """
    import keras

    x = x.to_global(sbp=summed(x.sbp))
    cut = {part.dim for part in x.sbp if isinstance(part, Split) and part.dim in dims}
    if any(x.shape[dim] < x.layout.parts_of_dim(dim) for dim in cut):
        x = x.to_global(sbp=tuple("B" if isinstance(part, Split) and part.dim in cut else part for part in x.sbp))
        cut = set()
    shape = [
        (x.layout.parts_of_dim(dim) if dim in cut else 1) if dim in dims else length
        for dim, length in enumerate(x.shape)
    ]
    layout = Layout(x.placement, x.sbp, shape)
    reduce = functools.partial(getattr(keras.ops, name), axis=tuple(dims), keepdims=True)
    (result,) = on_ranks(lambda _: lambda value: [reduce(value)], [x], [x], [layout], [x.dtype])
    return result
