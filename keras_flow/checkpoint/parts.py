"""What a process writes of a checkpoint: blocks of what its ranks hold, as they are or as a copy of this moment."""

from __future__ import annotations

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


@dataclass(frozen=True)
class WrittenPart:
    """What this process writes of one variable.

    Attributes:
        blocks: of a rank each, with the rows of the rank's shard before it.
        held: gives what the ranks hold.
    """

    blocks: list[tuple[pieces.Share, writer.FileBlock]]
    held: Callable[[], Mapping[int, np.ndarray]]


def parts_of(
    variables: Mapping[str, keras.Variable], who: Mapping[str, list[pieces.Share]], here: World
) -> Iterator[WrittenPart]:
    """What this process writes, variable by variable."""
    for name, variable in variables.items():
        mine = [piece for piece in who[name] if piece.rank in here.local_ranks]
        if not mine:
            continue
        shape = tuple(variable.shape)
        blocks = [
            (piece, writer.FileBlock(name, names.dtype_of(variable), piece.start, piece.shape, shape)) for piece in mine
        ]
        yield WrittenPart(blocks, functools.partial(_held, variable, mine))


def copied(parts: list[WrittenPart], here: World) -> list[WrittenPart]:
    """The values of now, for a thread to write while the variables change.

    They lie in one block of memory: to get pages for many small ones takes three times as long as to copy.
    """
    memory = np.empty(sum(_room(block) for part in parts for _, block in part.blocks), np.uint8)
    found, copies, end = [], [], 0
    with ThreadPoolExecutor(len(here.local_ranks)) as pool:  # one has no more than a part of the memory's bandwidth
        for part in parts:
            held, kept = part.held(), {}
            for piece, block in part.blocks:
                room = memory[end : end + block.bytes].view(manifest.numpy_dtype(block.dtype)).reshape(block.shape)
                copies.append(pool.submit(np.copyto, room, piece.cut(held[piece.rank])))
                kept[piece.rank], end = room, end + _room(block)
            # of each rank what it writes: all blocks begin at the first row of what is kept
            blocks = [(replace(piece, skipped=0), block) for piece, block in part.blocks]
            found.append(WrittenPart(blocks, functools.partial(dict, kept)))
    for each in copies:
        each.result()
    return found


def _room(block: writer.FileBlock) -> int:
    """Bytes that a block takes in memory, with those up to a place where elements of any dtype may begin."""
    return -(-block.bytes // 16) * 16


def _held(variable: keras.Variable, wanted: list[pieces.Share]) -> Mapping[int, np.ndarray]:
    """rank -> what it holds of a variable; of one without a layout every rank has the whole."""
    if keras_layout(variable) is None:
        return dict.fromkeys([piece.rank for piece in wanted], np.asarray(variable))
    return backend().shards(variable)
