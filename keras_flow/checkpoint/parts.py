"""The part of a checkpoint that a process writes: blocks of what its ranks hold, as they are or copied at once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from keras_flow.backends.active import backend
from keras_flow.checkpoint import manifest, names, pieces, writer
from keras_flow.current.variable_layout import keras_layout

if TYPE_CHECKING:
    import keras

    from keras_flow.current.world import World

#: the memory of copies that have been written, for those of the next checkpoint: at most one
_spare: list[np.ndarray] = []


@dataclass(frozen=True)
class WrittenPart:
    """The blocks of one variable that this process writes.

    Attributes:
        blocks: for each block the rows of a rank's shard, and the block of the file.
        held: returns what the ranks hold.
    """

    blocks: list[tuple[pieces.Share, writer.FileBlock]]
    held: Callable[[], Mapping[int, np.ndarray]]


def parts_of(
    variables: Mapping[str, keras.Variable], who: Mapping[str, list[pieces.Share]], here: World
) -> Iterator[WrittenPart]:
    """Yield what this process writes, variable by variable."""
    for name, variable in variables.items():
        mine = [piece for piece in who[name] if piece.rank in here.local_ranks]
        if not mine:
            continue
        shape = tuple(variable.shape)
        blocks = [
            (piece, writer.FileBlock(name, names.dtype_of(variable), piece.start, piece.shape, shape)) for piece in mine
        ]
        yield WrittenPart(blocks, functools.partial(_held, variable, mine))


def frozen(parts: list[WrittenPart], here: World) -> tuple[list[WrittenPart], np.ndarray]:
    """Hold or copy the present values, so that a thread can write them while the variables change.

    JAX and TensorFlow never write into a buffer that somebody holds, and show it read-only: it is held, and not copied.
    torch writes into its tensors. Copies lie in one block of memory, which `give_back` keeps for the next time: to get
    new pages takes several times as long as to copy.

    Returns:
        The parts with these values, and the memory of the copies.
    """
    memory = _memory(sum(_room(block) for part in parts for _, block in part.blocks))
    found, copies, end = [], [], 0
    with ThreadPoolExecutor(len(here.local_ranks)) as pool:  # one has no more than a part of the memory's bandwidth
        for part in parts:
            held, kept = part.held(), {}
            for piece, block in part.blocks:
                value = piece.cut(held[piece.rank])
                if value.flags.writeable:
                    room = memory[end : end + block.bytes].view(manifest.numpy_dtype(block.dtype)).reshape(block.shape)
                    copies.append(pool.submit(np.copyto, room, value))
                    value, end = room, end + _room(block)
                kept[piece.rank] = value
            # of each rank what it writes: all blocks begin at the first row of what is kept
            blocks = [(replace(piece, skipped=0), block) for piece, block in part.blocks]
            found.append(WrittenPart(blocks, functools.partial(dict, kept)))
    for each in copies:
        each.result()
    return found, memory if copies else np.empty(0, np.uint8)


def _memory(size: int) -> np.ndarray:
    """Return the memory of the last copies, if it is large enough. Two threads may ask."""
    with contextlib.suppress(IndexError):
        spare = _spare.pop()
        if len(spare) >= size:
            return spare
    return np.empty(size, np.uint8)  # pages that nobody writes into cost nothing


def give_back(memory: np.ndarray) -> None:
    """Keep the memory of copies that are written, if there are any, in place of that of earlier ones."""
    if len(memory):
        _spare[:] = [memory]


def _room(block: writer.FileBlock) -> int:
    """Return the bytes that a block takes in memory, rounded up so that the next block may have any dtype."""
    return -(-block.bytes // 16) * 16


def _held(variable: keras.Variable, wanted: list[pieces.Share]) -> Mapping[int, np.ndarray]:
    """Return what each rank holds of a variable, by rank, in its dtype; without a layout every rank holds the whole."""
    if keras_layout(variable) is None:
        held: Mapping[int, np.ndarray] = dict.fromkeys([piece.rank for piece in wanted], np.asarray(variable))
    else:
        held = backend().shards(variable)
    # engines hold some dtypes in others: int64 of JAX in int32, uint16 of torch in int32
    dtype = manifest.numpy_dtype(names.dtype_of(variable))
    return {rank: value.astype(dtype, copy=False) for rank, value in held.items()}
