"""Reading a checkpoint with NumPy alone: any part of any tensor, whatever layout it was saved in.

A reader takes the chunks that overlap with what is asked for. A chunk that is read is checked by its hash.

Example: columns 0 and 1 of a tensor [4, 4] in two chunks of two rows: both chunks are read, and half of each is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from keras_flow.checkpoint import manifest, store
from keras_flow.checkpoint.manifest import Chunk, Manifest
from keras_flow.checkpoint.store import Place
from keras_flow.errors import FlowError


class Reader:
    """Reads tensors of one checkpoint.

    Args:
        folder: the folder of the checkpoint.
        found: its manifest.
        check: compare the hash of each chunk, which is read whole for it. Otherwise, and where a chunk has no hash,
            only the elements that are needed are read.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self, folder: Place, found: Manifest, check: bool = True):
        self.folder, self.manifest, self.check = folder, found, check
        self.bytes_read = 0

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a part of a tensor.

        Args:
            name: the name of the tensor.
            index: one slice for each dim, without a step; None: all of it.

        Raises:
            FlowError: there is no such tensor, the index is no such list, or a file is missing, too short or damaged.
        """
        if name not in self.manifest.tensors:
            raise FlowError(f"{str(self.folder)!r} has no tensor {name!r}")
        tensor = self.manifest.tensors[name]
        index = [slice(None)] * len(tensor.shape) if index is None else index
        if len(index) != len(tensor.shape) or any(not isinstance(p, slice) or p.step not in (None, 1) for p in index):
            wanted = "give one slice for each dim, without a step"
            raise FlowError(f"{name!r} has shape {list(tensor.shape)}, and {list(index)} is asked for: {wanted}")
        bounds = [part.indices(length)[:2] for part, length in zip(index, tensor.shape, strict=True)]
        dtype = manifest.numpy_dtype(tensor.dtype)
        out = np.empty([max(0, stop - start) for start, stop in bounds], dtype)
        filled = 0
        for chunk in tensor.chunks:
            common = [
                (max(start, first), min(stop, first + length))
                for (start, stop), first, length in zip(bounds, chunk.start, chunk.shape, strict=True)
            ]
            if any(stop <= start for start, stop in common):
                continue
            index = tuple(slice(a - first, b - first) for (a, b), first in zip(common, chunk.start, strict=True))
            where = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))
            out[where] = self._part(name, chunk, dtype, index)
            filled += out[where].size
        if filled != out.size:
            raise FlowError(f"{name!r} in {str(self.folder)!r}: {out.size - filled} elements are in no chunk")
        return out

    def _part(self, name: str, chunk: Chunk, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
        """Elements of a chunk."""
        path, is_checked = self.folder / chunk.file, self.check and bool(chunk.xxh3_64)
        mapped = path if isinstance(path, Path) and not is_checked else None
        data = b""
        try:
            if mapped is None:
                data = store.read(path, chunk.begin, chunk.end)
            end = chunk.begin + len(data) if mapped is None else mapped.stat().st_size
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise FlowError(_damaged(self.folder, name, chunk, f"cannot be read ({why})")) from error
        if chunk.end - chunk.begin != (needed := math.prod(chunk.shape) * dtype.itemsize):
            raise FlowError(_damaged(self.folder, name, chunk, f"are not the {needed} bytes of {dtype}"))
        if missing := max(0, chunk.end - end):
            raise FlowError(_damaged(self.folder, name, chunk, f"ends {missing} bytes too early"))
        if mapped is not None:
            part = np.memmap(mapped, dtype, "r", chunk.begin, chunk.shape)[index]
            self.bytes_read += part.nbytes
            return part
        self.bytes_read += len(data)
        if is_checked and xxhash.xxh3_64_hexdigest(data) != chunk.xxh3_64:
            raise FlowError(_damaged(self.folder, name, chunk, "does not have the hash of what was written"))
        return np.frombuffer(data, dtype).reshape(chunk.shape)[index]


def _damaged(folder: Place, name: str, chunk: Chunk, what: str) -> str:
    return (
        f"{name!r} in {str(folder / chunk.file)!r}, bytes {chunk.begin} to {chunk.end} (elements from "
        f"{list(chunk.start)} of shape {list(chunk.shape)}), {what}. Load another step, or the rest by strict=False"
    )


def faults(reader: Reader, name: str) -> Iterator[str]:
    """Read all chunks of a tensor, one after the other; yield what is wrong with each that is damaged."""
    dtype = manifest.numpy_dtype(reader.manifest.tensors[name].dtype)
    for chunk in reader.manifest.tensors[name].chunks:
        try:
            reader._part(name, chunk, dtype, ())
        except FlowError as error:
            yield str(error)
