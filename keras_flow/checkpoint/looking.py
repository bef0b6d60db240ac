"""Questions about a checkpoint that need neither Keras nor an engine: what is in it, and whether it is whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_flow import progress, units
from keras_flow.checkpoint import manifest, store
from keras_flow.checkpoint.manifest import Manifest
from keras_flow.checkpoint.reader import Reader, faults
from keras_flow.errors import FlowError


def inspect(directory: str | os.PathLike[str], *, step: int | str = "latest") -> Manifest:
    """Return the manifest of a checkpoint: names, shapes, dtypes, layouts, and where `fit` was. It prints as a table.

    Args:
        directory: directory of checkpoints, or one checkpoint's folder.
        step: the number of a checkpoint, or `"latest"`.

    Raises:
        FlowError: there is none, or its manifest is damaged.
    """
    return manifest.read(store.at(directory), step)[1]


def verify(directory: str | os.PathLike[str], *, step: int | str = "latest") -> int:
    """Read a checkpoint and compare the hash of each chunk; return how many bytes were right.

    Raises:
        FlowError: a file is missing, too short or damaged. It names the first 10 tensors, with file and bytes.
    """
    folder, found = manifest.read(store.at(directory), step)
    reader = Reader(folder, found)
    wrong: list[str] = []
    with progress.working(f"reading {units.amount(found.bytes)}") as say:
        for tensor in found.tensors:
            say(tensor)
            wrong += faults(reader, tensor)
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        shown = "\n  ".join(wrong[:10])
        raise FlowError(f"the checkpoint {str(folder)!r} is damaged:\n  {shown}{more}")
    return reader.bytes_read


def read_tensor(
    directory: str | os.PathLike[str], name: str, index: Sequence[slice] | None = None, *, step: int | str = "latest"
) -> np.ndarray:
    """Read a tensor of a checkpoint, or a part of it, with NumPy alone.

    Args:
        directory: directory of checkpoints, or one checkpoint's folder.
        name: the name of the tensor, as `inspect` shows it.
        index: one slice for each dim, without a step; None: all of it.
        step: the number of a checkpoint, or `"latest"`.

    Raises:
        FlowError: there is no such tensor, the index is of another kind, or a file is missing or damaged.
    """
    return Reader(*manifest.read(store.at(directory), step)).read(name, index)


def facts_of(directory: str | os.PathLike[str], found: Manifest) -> dict[str, Any]:
    """Return what `keras-flow checkpoint` shows beside the tensors: name -> value."""
    others = [each for each in manifest.steps(store.at(directory)) if each != found.step]
    return {**found.facts(), "other steps": ", ".join(map(str, others[-10:])) or "none"}
