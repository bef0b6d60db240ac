"""The contents of a checkpoint, as data: `manifest.json`, which is written last and read first.

A checkpoint is a folder `step-00000120` with a safetensors file for each rank that wrote something. A tensor may lie in
several files, each with a block of it; the manifest says which bytes are which rows.

Example: a kernel [4, 2] that two ranks split by rows.

    rank-00000-of-00002.safetensors    dense/kernel [2, 2], rows 0 and 1
    rank-00001-of-00002.safetensors    dense/kernel [2, 2], rows 2 and 3
    manifest.json                      dense/kernel: float32 [4, 2], two chunks with file, bytes, start, shape, hash
"""

from __future__ import annotations

import datetime
import io
import itertools
import json
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

import keras_flow
from keras_flow.checkpoint.store import MANIFEST, Place
from keras_flow.errors import FlowError
from keras_flow.units import amount, counted

if TYPE_CHECKING:
    from rich.console import Console

#: what `manifest.json` begins with, and the version that this code writes
FORMAT, VERSION = "keras_flow checkpoint", 1
NAME = MANIFEST
#: tensors that a table shows
SHOWN = 40
#: the model as Keras serializes it, where it can
MODEL = "model.json"
_STEP = re.compile(r"step-(\d{8,})")

#: safetensors' name of a dtype -> Keras's
DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
SAFETENSORS = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """Rows of a block of a tensor that are contiguous in a file.

    Attributes:
        file: its path, from the folder of the manifest.
        begin: the first byte in the file.
        end: the byte after the last one.
        start: where its first element is in the tensor, one number for each dim.
        shape: its lengths.
        xxh3_64: the hash of its bytes, in hexadecimal.
    """

    file: str
    begin: int
    end: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_64: str


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: Keras's name of it.
        shape: logical shape.
        layout: its nd_sbp when it was saved, for people.
        chunks: where its elements are; together they are the whole tensor, and none is in two of them.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: its number.
        tensors: name -> tensor.
        saved: the versions, the engine and the number of ranks that saved it, and when.
        training: epoch, batch, logs and the like, where `fit` was running.
        random: the states of generators.
        extra: what the program gave.
    """

    step: int
    tensors: Mapping[str, Tensor]
    saved: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    def facts(self) -> dict[str, Any]:
        """What is shown beside the tensors: name -> value."""
        where = "outside of fit"
        if (epoch := self.training.get("epoch")) is not None:
            batch = self.training.get("batch")
            where = f"{counted(epoch, 'epoch')} done" + (f", {batch} batches of the next" if batch else "")
        return {
            "step": self.step,
            "saved": ", ".join(f"{key} {value}" for key, value in self.saved.items()),
            "training": where,
            "tensors": f"{len(self.tensors)}, {amount(self.bytes)}",
        }

    def show(self, console: Console, facts: Mapping[str, Any], most: int | None, hint: str) -> None:
        """Print facts and a table of the first `most` tensors (None: all), and how the others are shown (`hint`)."""
        from rich.table import Table

        for name, value in facts.items():
            console.print(f"{name}: {value}", highlight=False)
        table = Table("tensor", "dtype", "shape", "layout", "bytes", "files", box=None)
        for name, tensor in itertools.islice(self.tensors.items(), most):
            files = len({chunk.file for chunk in tensor.chunks})
            table.add_row(name, tensor.dtype, f"{[*tensor.shape]}", tensor.layout, amount(tensor.bytes), f"{files}")
        console.print(table)
        if most is not None and most < len(self.tensors):
            console.print(f"and {len(self.tensors) - most} more; {hint}")

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160, color_system=None)
        with console.capture() as shown:
            self.show(console, self.facts(), SHOWN, "`.tensors` has all")
        return shown.get().rstrip()

    def to_json(self) -> str:
        """The text of `manifest.json`; its last entry is the hash of all others."""
        tensors = {
            name: {**vars(tensor), "chunks": [vars(chunk) for chunk in tensor.chunks]}
            for name, tensor in self.tensors.items()
        }
        body = {"format": FORMAT, "version": VERSION, **vars(self), "tensors": tensors}
        # without `indent`, with which Python's json has no encoder in C
        return json.dumps({**body, "xxh3_64": _hash_of(body)})

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read the text of a manifest.

        Args:
            text: the content of the file.
            where: its path, for messages.

        Raises:
            FlowError: it is none, is damaged, or is of a version that comes later than this code.
        """
        try:
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise ValueError(f"its format is {body['format']!r}")
            version, said = body["version"], body.pop("xxh3_64")
        except (ValueError, KeyError, TypeError) as error:
            raise FlowError(f"{where} is no manifest of a checkpoint, or is damaged ({error})") from error
        if version > VERSION:
            raise FlowError(f"{where} has version {version} of the format; this keras_flow reads up to {VERSION}")
        if said != _hash_of(body):
            raise FlowError(f"{where} is damaged: its text has the hash {_hash_of(body)}, and it says {said}")
        tensors = {
            name: Tensor(
                each["dtype"],
                tuple(each["shape"]),
                each["layout"],
                tuple(
                    Chunk(**{**chunk, "start": tuple(chunk["start"]), "shape": tuple(chunk["shape"])})
                    for chunk in each["chunks"]
                ),
            )
            for name, each in body["tensors"].items()
        }
        return cls(tensors=tensors, **{key: body[key] for key in ("step", "saved", "training", "random", "extra")})


def _hash_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of a name of Keras's."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def saved_by(engine: str, ranks: int, processes: int) -> dict[str, Any]:
    """Who saves a checkpoint, and when: the entry `saved` of its manifest."""
    return {
        "keras_flow": keras_flow.__version__,
        "engine": engine,
        "ranks": ranks,
        "processes": processes,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def is_weight(name: str) -> bool:
    """Whether a tensor is a weight of the model, and no state of its optimizer, metrics or seed generators."""
    return "@" not in name and not name.endswith("/seed_generator_state")


# ---- folders


def is_count(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least so much."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def file_of(rank: int, ranks: int) -> str:
    """The name of the file of a rank."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def folder_of(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08d}"


def steps(directory: Place) -> list[int]:
    """Return the steps of the checkpoints in a directory, in order; folders that were not finished are left out."""
    if not directory.is_dir():
        return []
    found = [_STEP.fullmatch(each.name) for each in directory.iterdir() if (each / NAME).is_file()]
    return sorted(int(match.group(1)) for match in found if match)


def read(directory: Place, step: int | str = "latest") -> tuple[Place, Manifest]:
    """Find a checkpoint; return its folder and its manifest.

    Args:
        directory: directory of checkpoints, or one checkpoint's folder.
        step: its number, or `"latest"`.

    Raises:
        FlowError: there is none.
    """
    if (directory / NAME).is_file():
        folder = directory
    else:
        there = steps(directory)
        if not there:
            what = (
                "is no directory" if not directory.is_dir() else "holds no checkpoint: no folder step-N with a manifest"
            )
            raise FlowError(
                f"{str(directory)!r} {what}; name the directory given to kf.callbacks.Checkpoint or kf.checkpoint.save"
            )
        wanted = there[-1] if step == "latest" else step
        if wanted not in there:
            shown = ", ".join(map(str, there[-10:]))
            raise FlowError(f"{str(directory)!r} has no checkpoint of step {wanted}; there are {shown}")
        folder = directory / folder_of(int(wanted))
    path = folder / NAME
    found = Manifest.from_json(path.read_text(encoding="utf-8"), str(path))
    if step not in ("latest", found.step):  # the folder of one was given
        raise FlowError(f"{str(folder)!r} is the checkpoint of step {found.step}, and step {step} is asked for")
    return folder, found
