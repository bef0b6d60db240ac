"""Weights files, read slice by slice: a large weight in an HDF5 file is mapped, and each rank copies its own part.

Keras reads an entry whole before it assigns it. Under a distribution the entry is a `numpy.memmap` of its place in the
file instead (Keras writes entries in one piece, uncompressed), and assignment copies a rank's slices in small blocks.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_flow.backends.hooking import hook
from keras_flow.current.keras_places import safe_get_h5_dataset

#: bytes of an entry from which it is mapped
LEAST = 1 << 20
#: bytes read at once
BLOCK = 8 << 20


@hook(
    "keras:saving_lib",
    "H5IOStore.__getitem__",
    "a rank copies its own part of a weight from the file; Keras reads each weight whole on every rank",
)
def entry(_: object, original: Callable[..., np.ndarray], store: Any, key: str) -> np.ndarray:
    """Hook on `H5IOStore.__getitem__`: the entry, mapped where it is contiguous in a file of its own."""
    dataset = safe_get_h5_dataset(store._h5_entry_group, key)
    place = getattr(getattr(dataset, "id", None), "get_offset", lambda: None)()  # None where chunked or compressed
    if place is None or dataset.nbytes < LEAST or "dtype" in dataset.attrs or dataset.file.driver == "fileobj":
        return original(store, key)
    return np.memmap(dataset.file.filename, dataset.dtype, "r", place, dataset.shape)


@hook(
    "keras:saving_lib",
    "is_memory_sufficient",
    "a .keras file holds its weights in one entry, which Keras reads and writes in memory",
)
def not_into_memory(_: object, original: Callable[..., bool], model: object) -> bool:
    """Hook on `is_memory_sufficient`: the weights of a `.keras` file pass through the disk, not through memory."""
    return False


def is_mapped(value: object) -> bool:
    """Whether a value is an array in a file, whole."""
    return isinstance(value, np.memmap) and isinstance(value.base, mmap.mmap) and value.flags.c_contiguous


def blocks(value: np.memmap, index: Sequence[slice]) -> Iterator[tuple[slice, np.ndarray]]:
    """The elements `index` of a mapped array, in blocks: rows of what is read, and their values, copied.

    Each block is mapped for itself, so that no more of the file than a block is in memory.
    """
    rows = value.shape[0]
    first, last, _ = (index[0] if index else slice(None)).indices(rows)
    size = value.dtype.itemsize * math.prod(value.shape[1:])
    # whole rows, because a window of a file is one range of bytes
    step = max(1, BLOCK // max(size, 1))
    for start in range(first, last, step):
        count = min(step, last - start)
        assert value.filename is not None
        window = np.memmap(value.filename, value.dtype, "r", value.offset + start * size, (count, *value.shape[1:]))
        yield slice(start - first, start - first + count), np.array(window[(slice(None), *index[1:])])


def read(value: np.ndarray, index: Sequence[slice]) -> np.ndarray:
    """The elements `index` of an array; of a mapped one a copy, read in blocks."""
    if not is_mapped(value):
        return value[tuple(index)]
    bounds = [part.indices(length) for part, length in zip(index, value.shape, strict=False)]
    shape = tuple(max(0, stop - start) for start, stop, _ in bounds) + value.shape[len(bounds) :]
    out = np.empty(shape, value.dtype)
    for rows, part in blocks(value, index):  # type: ignore[arg-type]
        out[rows] = part
    return out
