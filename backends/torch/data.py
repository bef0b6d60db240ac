"""Batches on PyTorch: what of a logical batch a rank computes is cut here, without communication."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from keras import tree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends import leaves
from keras_flow.backends.reading.batch_watch import BatchWatch, Digest, digest_of_part, of_single_batches
from keras_flow.backends.torch import layouts, local_tensors
from keras_flow.backends.torch.rows.split_rows import SplitRows, gathered
from keras_flow.backends.torch.variables import from_logical
from keras_flow.current.batch import rows_of
from keras_flow.current.keras_places import engine_core as core
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.current.distribution import Distribution


def to_tensors(data: object) -> object:
    """The batch as torch tensors; None and strings stay."""

    def convert(leaf: object) -> object:
        # strings stay on the host: the layers that read them (StringLookup) run before the step
        if leaf is None or isinstance(leaf, DTensor | str | bytes):
            return leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
            return leaf
        return core.convert_to_tensor(leaf)

    return leaves.mapped(convert, data)


def map_call(
    function: Callable[[object], object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Apply a function to every leaf of a call's arguments."""
    return tuple(leaves.mapped(function, arg) for arg in args), {
        name: leaves.mapped(function, value) for name, value in kwargs.items()
    }


def rows(data: object) -> int:
    """Rows of the logical batch: those of its first tensor. 0 where it has none."""
    counts = rows_of(leaves.flat(data))
    return counts[0] if counts else 0


def put_batch(data: object, distribution: Distribution) -> object:
    """The batch as DTensors.

    One that does not divide is replicated: DTensor cannot flatten dimensions of uneven shards.
    """
    mesh = layouts.mesh(distribution.placement)
    count = rows(data)
    split = layouts.engine_layout(distribution.batch_layout((count,)))
    whole = layouts.replicated(mesh)

    def put(leaf: object) -> object:
        # strings stay on the host, and numbers are the same on every rank
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor) or not leaf.ndim:
            return leaf
        # a leaf with another first dim has no rows: a table for all of them, say
        placements = split if leaf.shape[0] == count else whole
        if isinstance(leaf, SplitRows) and leaf.own is not None and _is_own(leaf, mesh, placements):
            on_mesh = local_tensors.from_local(leaf.own, leaf.shape, mesh, placements)
        else:
            on_mesh = from_logical(gathered(leaf), mesh, placements)
        return leaves.with_mask_of(leaf, on_mesh, put)

    return leaves.mapped(put, data)


def _is_own(leaf: SplitRows, mesh: DeviceMesh, placements: layouts.TorchPlacements) -> bool:
    """Whether the rows that this rank has are its piece of a DTensor."""
    return layouts.local_slices(leaf.shape, mesh, placements)[0] == leaf.rows.own(leaf.shape[0])


def refuse(x: object) -> None:
    """Raise where an input cannot become a torch tensor, before Keras tries."""
    for path, leaf in tree.flatten_with_path(getattr(x, "element_spec", x)):  # of a tf.data.Dataset
        name = "x" + "".join(f"[{key!r}]" for key in path)
        if isinstance(leaf, str) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU"):
            raise FlowError(
                f"input {name} holds strings: torch has no tensors of strings (Keras: `Invalid dtype: str`). Apply "
                "StringLookup, TextVectorization or Hashing to the data before the model, as in "
                "`x = keras.layers.StringLookup(vocabulary=...)(words)`, or use the tensorflow backend"
            )
        if type(leaf).__name__ == "SparseTensorSpec":
            raise FlowError(
                f"input {name} of the tf.data.Dataset is sparse: Keras makes no torch tensor of a tf.SparseTensor. "
                "Make it dense, `dataset.map(lambda x, y: (tf.sparse.to_dense(x), y))`, or use the tensorflow backend"
            )
        if type(leaf).__name__ in ("RaggedTensor", "RaggedTensorSpec"):
            raise FlowError(
                f"input {name} is ragged: torch has no ragged tensors (Keras: `ragged=True` is not supported with the "
                "torch backend). Pad it, `ragged.to_tensor()`, or use the tensorflow backend"
            )


def _digest(leaf: object) -> Digest:
    if isinstance(leaf, SplitRows):
        text = f"{leaf.dtype} of shape {list(leaf.shape)}"
        return Digest(text, {}) if leaf.origin is None else digest_of_part(leaf.origin, text, _digest)
    if not isinstance(leaf, torch.Tensor):
        return Digest(type(leaf).__name__, {"all": zlib.crc32(repr(leaf).encode())})
    # of the bytes: equal values have equal bytes here, and nan compares as well
    value = leaf.detach().cpu().contiguous().reshape(-1)
    sums = {"all": zlib.crc32(value.view(torch.uint8).numpy().tobytes())}
    return Digest(f"{leaf.dtype} of shape {list(leaf.shape)}", sums)


#: of the loop that is running
watch = BatchWatch(_digest)


def watch_of_step() -> BatchWatch:
    """What the batch of the step that begins is compared by: a loop's, or that of the method for one batch."""
    return of_single_batches(_digest) or watch
