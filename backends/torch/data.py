"""Batches on PyTorch: every rank reads the logical batch; its part is cut here, without communication."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as torch_distributed
from keras.src import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.torch import core
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import layouts
from keras_flow.backends.torch.split_rows import SplitRows, gathered
from keras_flow.backends.torch.variables import from_logical
from keras_flow.current.batch import rows_of
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.current.distribution import Distribution

#: the first batches of each data source are compared across ranks, and then every so many
_FIRST, _EVERY = 3, 100


def to_tensors(data: object) -> object:
    """The batch as torch tensors; None and strings stay."""

    def convert(leaf: object) -> object:
        # strings stay on the host: the layers that read them (StringLookup) run before the step
        if leaf is None or isinstance(leaf, DTensor | str | bytes):
            return leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
            return leaf
        return core.convert_to_tensor(leaf)

    return tree.map_structure(convert, data)


def map_call(
    function: Callable[[object], object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Apply a function to every leaf of a call's arguments."""
    return tuple(tree.map_structure(function, arg) for arg in args), {
        name: tree.map_structure(function, value) for name, value in kwargs.items()
    }


def rows(data: object) -> int:
    """Rows of the logical batch: those of its first tensor. 0 where it has none."""
    counts = rows_of(tree.flatten(data))
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
        mask = get_keras_mask(leaf)
        # a leaf with another first dim has no rows: a table for all of them, say
        placements = split if leaf.shape[0] == count else whole
        if isinstance(leaf, SplitRows) and leaf.own is not None and _is_own(leaf, mesh, placements):
            on_mesh = layouts.from_local(leaf.own, leaf.shape, mesh, placements)
        else:
            on_mesh = from_logical(gathered(leaf), mesh, placements)
        if mask is not None:
            set_keras_mask(on_mesh, put(mask))
        return on_mesh

    return tree.map_structure(put, data)


def _is_own(leaf: SplitRows, mesh: DeviceMesh, placements: layouts.TorchPlacements) -> bool:
    """Whether the rows that this rank has are its piece of a DTensor."""
    return layouts.local_slices(leaf.shape, mesh, placements)[0] == leaf.rows.own(leaf.shape[0])


def refuse(x: object) -> None:
    """Raise where an input cannot become a torch tensor, before Keras tries."""
    for path, leaf in tree.flatten_with_path(x):
        name = "x" + "".join(f"[{key!r}]" for key in path)
        if isinstance(leaf, str) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU"):
            raise FlowError(
                f"input {name} holds strings: torch has no tensors of strings (Keras: `Invalid dtype: str`). Apply "
                "StringLookup, TextVectorization or Hashing to the data before the model, as in "
                "`x = keras.layers.StringLookup(vocabulary=...)(words)`, or use the tensorflow backend"
            )
        if type(leaf).__name__ == "RaggedTensor":
            raise FlowError(
                f"input {name} is ragged: torch has no ragged tensors (Keras: `ragged=True` is not supported with the "
                "torch backend). Pad it, `ragged.to_tensor()`, or use the tensorflow backend"
            )


def is_compared(number: int) -> bool:
    """Whether the batch of this number is one of those that the ranks compare."""
    # by number: all ranks compare the same batches, so that none waits alone
    return number < _FIRST or number % _EVERY == 0


class BatchWatch:
    """Finds ranks that are fed different batches, which would train on without any error.

    It compares checksums of the first batches of a data source and of every 100th.

    Attributes:
        seen: batches of the source so far.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.batches: int | None = None

    def restart(self, batches: int | None) -> None:
        """A new data source, of so many batches (None: not known): look at its first ones."""
        self.seen, self.batches = 0, batches

    def see(self, data: object) -> bool:
        """Compare this batch where it is due. Returns whether it is the first of its source.

        Raises:
            FlowError: on all ranks, naming the ranks and the input that differ.
        """
        is_due, index, self.seen = self.is_due(), self.seen, self.seen + 1
        if torch_distributed.is_initialized() and is_due:
            _compare(data, index, self.batches)
        return index == 0

    def is_due(self, number: int | None = None) -> bool:
        """Whether the batch of this number is one of those that are compared; None: the next one."""
        return is_compared(self.seen if number is None else number)


#: of the loop that is running
watch = BatchWatch()


def _compare(data: object, index: int, batches: int | None) -> None:
    mine = {name: _checksum(leaf) for name, leaf in _named(data)}
    sent: list[tuple[int | None, dict[str, tuple[str, int]]]]
    sent = [(None, {}) for _ in range(torch_distributed.get_world_size())]
    # a checksum for each input, not the input: a few bytes for each rank
    torch_distributed.all_gather_object(sent, (batches, mine))
    everyone = [facts for _, facts in sent]
    lengths = [length for length, _ in sent]
    if len(set(lengths)) > 1:
        other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise FlowError(
            f"the ranks are fed data of different lengths: rank 0 has {lengths[0]} batches, rank {other} has "
            f"{lengths[other]}, and would wait for the others without end. Every rank must have the same logical data; "
            "do not shard it by rank"
        )
    for name in sorted({name for facts in everyone for name in facts}):
        differ = [rank for rank, facts in enumerate(everyone) if facts.get(name) != everyone[0].get(name)]
        if differ:
            received = ", ".join(
                f"rank {rank}: {everyone[rank].get(name, ('nothing', 0))[0]}" for rank in (0, differ[0])
            )
            raise FlowError(
                f"the ranks are fed different batches: input {name!r} of batch {index} differs on rank"
                f"{'s' if len(differ) > 1 else ''} {', '.join(map(str, differ))} from rank 0 ({received}). Every rank "
                "must read the same logical batch in the same order: seed what shuffles or augments (a DataLoader's "
                "generator, tf.data's shuffle(seed=...), a generator's own random state), and do not shard the data "
                "by rank"
            )


def _named(data: object) -> list[tuple[str, object]]:
    out = []
    for role, part in zip(("x", "y", "sample_weight"), _roles(data), strict=False):
        for path, leaf in tree.flatten_with_path(part):
            if leaf is not None:
                out.append((role + "".join(f"[{key!r}]" for key in path), leaf))
    return out


def _roles(data: object) -> tuple[object, ...]:
    """(x, y, sample_weight) of what a step function receives: a list of one batch."""
    batch = data[0] if isinstance(data, list) and len(data) == 1 else data
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _checksum(leaf: object) -> tuple[str, int]:
    # of which a rank has its own rows: there is nothing to compare but the batch's shape and number
    if isinstance(leaf, SplitRows):
        return (f"{leaf.dtype} of shape {list(leaf.shape)}", leaf.origin)
    if not isinstance(leaf, torch.Tensor):
        return (type(leaf).__name__, zlib.crc32(repr(leaf).encode()))
    # of the bytes: equal values have equal bytes here, and nan compares as well
    value = leaf.detach().cpu().contiguous().reshape(-1)
    return (f"{leaf.dtype} of shape {list(leaf.shape)}", zlib.crc32(value.view(torch.uint8).numpy().tobytes()))
