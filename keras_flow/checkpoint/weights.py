"""`kf.checkpoint.load_weights`: pretrained weights, of which each rank reads what it holds.

Files of safetensors are read by their header, as a checkpoint is by its manifest: name, dtype, shape and bytes of each
tensor. Keras's own files (`.keras`, `.weights.h5`, sharded `.weights.json`) are read by Keras; under a distribution it
maps large weights and copies a rank's part of each.
"""

from __future__ import annotations

import glob
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_flow.backends.rendezvous import meeting
from keras_flow.checkpoint import loading, names
from keras_flow.checkpoint.manifest import DTYPES, Chunk, Manifest, Tensor, is_weight, numpy_dtype
from keras_flow.checkpoint.reader import Reader
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

#: how names of Keras's own files of weights end
_KERAS = (".keras", ".weights.h5", ".weights.json")
#: bytes of a tensor that are mapped at once
_MAPPED = 32 << 20


def load_weights(
    path: str | os.PathLike[str],
    model: keras.Model,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
) -> loading.Loaded:
    """Load the weights of a model from files that need not be a checkpoint of keras_flow.

    No rank reads or holds the whole of a weight that is split. All processes of a job call it. The optimizer stays as
    it is; of Keras's own files it is loaded too, as by `model.load_weights`, where they have it.

    Args:
        path: a `.keras`, `.weights.h5` or `.weights.json` file of Keras; a file of safetensors, several by a pattern
            (`"model-*.safetensors"`), or the folder of `model.safetensors` or `model.safetensors.index.json`.
        model: a built model.
        strict: the file has all weights of the model, and no other tensor; otherwise what does not fit is left out.
        rename: for safetensors: name in the file -> name in the model, of a variable, or of what comes before a `/`.

    Returns:
        Bytes read by this process (0 where Keras reads), and what `strict=False` left as it was.

    Raises:
        FlowError: there is no such file, or it is of another model. Keras's own errors for its own files.

    Example:
        >>> import keras, tempfile, keras_flow as kf
        >>> ranks, folder = kf.init(4), tempfile.mkdtemp()
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="out")], name="net")
        >>> saved = kf.checkpoint.save(folder, model, step=3)
        >>> file = kf.checkpoint.export(folder, f"{folder}/model.safetensors", "safetensors")
        >>> kf.checkpoint.load_weights(file, model).bytes_read
        40
    """
    model = loading.built(model)
    meeting.meet("kf.checkpoint.load_weights")
    if str(path).endswith(_KERAS):
        if rename:
            raise FlowError("rename= is for safetensors: Keras finds the layers of its own files by class and order")
        try:
            model.load_weights(path, skip_mismatch=not strict)
        except (zipfile.BadZipFile, OSError) as error:
            raise FlowError(f"the weights in {os.fspath(path)!r} cannot be read: {error}") from error
        return loading.Loaded(0, {})
    found = tensors_in(path)
    reader = Reader(Path(path).absolute().parent, found, check=False)
    there = [name for name in found.tensors if is_weight(name)]
    what = f"the weights in {os.fspath(path)!r} are not those of {model.name!r}"
    left_out = loading.put(reader, there, names.weights_of(model), what, strict, rename)
    return loading.Loaded(0, {}, {}, reader.bytes_read, left_out)


def tensors_in(path: str | os.PathLike[str]) -> Manifest:
    """Return what files of safetensors hold, as the manifest of a checkpoint without hashes.

    Raises:
        FlowError: there is no such file, or it is none of safetensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(Path(path).absolute()):
        for name, tensor in _header(file):
            before = tensors.get(name)
            if before is None:
                tensors[name] = tensor
                continue
            starts = {each.start for each in before.chunks if each.end > each.begin}
            if doubled := [each.start for each in tensor.chunks if each.start in starts]:
                raise FlowError(
                    f"{name!r} is in {str(file)!r}, and in a file before it with the same elements (from "
                    f"{list(doubled[0])}): name the files of one model"
                )
            shape = tuple(map(max, before.shape, tensor.shape))
            tensors[name] = Tensor(tensor.dtype, shape, "", before.chunks + tensor.chunks)
    return Manifest(0, tensors)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        single, index = path / "model.safetensors", path / "model.safetensors.index.json"
        path = single if single.is_file() else index
    if path.name.endswith(".index.json") and path.is_file():
        found = [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(each) for each in sorted(glob.glob(str(path)))]
    if not found:
        raise FlowError(
            f"{str(path)!r}: no such file. It is a .keras, .weights.h5, .weights.json or .safetensors file, a pattern, "
            "or the folder of model.safetensors or model.safetensors.index.json"
        )
    return found


def _header(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and place of each tensor of a file of safetensors (https://huggingface.co/docs/safetensors)."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > min(100 << 20, file.stat().st_size):  # the format's own bound
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(opened.read(size))
        blocks = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for name, said in header.items():
            dtype, shape, begin = DTYPES[said["dtype"]], tuple(said["shape"]), 8 + size + said["data_offsets"][0]
            block = blocks.get(name, {})
            start = tuple(block.get("saved_offsets", [0] * len(shape)))
            whole = block.get("global_shape", [first + length for first, length in zip(start, shape, strict=True)])
            yield name, Tensor(dtype, tuple(whole), "", tuple(_chunks(str(file), dtype, shape, start, begin)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlowError(f"{str(file)!r} is no file of safetensors, or cannot be read ({error})") from error


def _chunks(file: str, dtype: str, shape: tuple[int, ...], start: tuple[int, ...], begin: int) -> Iterable[Chunk]:
    """Yield the rows of a block, as many as are mapped at once."""
    size = numpy_dtype(dtype).itemsize
    if not shape:
        return [Chunk(file, begin, begin + size, (), (), "")]
    row = size * math.prod(shape[1:])
    step = max(1, _MAPPED // max(1, row))
    return [
        Chunk(
            file,
            begin + first * row,
            begin + min(first + step, shape[0]) * row,
            (start[0] + first, *start[1:]),
            (min(step, shape[0] - first), *shape[1:]),
            "",
        )
        for first in range(0, shape[0], step)
    ]
