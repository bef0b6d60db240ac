"""Writing the file of one rank, in safetensors' format: a header of JSON with names and offsets, then the elements.

It is written here and not by the safetensors library, which takes all tensors as bytes at once: here a block of rows is
written and hashed at a time, so that writing needs no memory. The header's `DCP_SHARDING_INFO` says where each block
lies in its tensor, as torch's `HuggingFaceStorageWriter` does: torch's reader puts the tensors together from it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from keras_flow.checkpoint import store
from keras_flow.checkpoint.manifest import SAFETENSORS, Chunk, numpy_dtype
from keras_flow.checkpoint.store import Place

#: bytes that are hashed together, in whole rows: what a reader must read at least to check what it reads
CHUNK = 4 << 20


@dataclass(frozen=True)
class FileBlock:
    """A block of a tensor that is to be written.

    Attributes:
        name: the name of the tensor.
        dtype: Keras's name of it.
        start: where the block begins in the tensor.
        shape: its lengths.
        whole: the tensor's lengths.
    """

    name: str
    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class File:
    """A file that is being written. Blocks are added in the order in which they were announced.

    Args:
        path: the path of the file, which is not there.
        blocks: at most one of each tensor.
        folder: what the folder of the manifest will be called; None: that of the file.

    Raises:
        OSError: there is no space left, or the folder may not be written.

    Attributes:
        chunks: name -> the chunks of its block.
    """

    def __init__(self, path: Place, blocks: Sequence[FileBlock], folder: Place | None = None):
        self.chunks: dict[str, list[Chunk]] = {}
        self._path, self._file = path, path.open("xb")
        self._name = store.name_in(folder or path.parent, path)
        sharding = {block.name: {"saved_offsets": block.start, "global_shape": block.whole} for block in blocks}
        header: dict[str, object] = {
            "__metadata__": {"format": "np", "DCP_SHARDING_INFO": json.dumps(sharding)},
        }
        offset = 0
        for block in blocks:
            header[block.name] = {
                "dtype": SAFETENSORS[block.dtype],
                "shape": block.shape,
                "data_offsets": [offset, offset + block.bytes],
            }
            offset += block.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._position = 8 + len(text)

    def add(self, block: FileBlock, value: np.ndarray) -> None:
        """Write the elements of the next block."""
        assert value.nbytes == block.bytes, f"{block.name}: {value.dtype} {value.shape} for {block}"
        rows = value.reshape(1) if value.ndim == 0 else value
        size = max(1, CHUNK // max(1, rows[:1].nbytes))
        chunks = self.chunks[block.name] = []
        for first in range(0, len(rows), size):
            part = np.ascontiguousarray(rows[first : first + size])
            data = memoryview(part.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy's stubs tell buffers from 3.12 on
            self._file.write(data)
            start, shape = ((block.start[0] + first, *block.start[1:]), part.shape) if value.ndim else ((), ())
            end = self._position + part.nbytes
            chunks.append(Chunk(self._name, self._position, end, start, shape, xxhash.xxh3_64_hexdigest(data)))
            self._position = end

    def close(self, down_to_disk: bool) -> None:
        """Close the file, after its bytes were flushed to the disk if that was asked for."""
        with self._file:
            if down_to_disk and isinstance(self._path, Path):  # a store has it when the file is closed
                self._file.flush()
                os.fsync(self._file.fileno())
