"""`kf.checkpoint.export` and `import_`: checkpoints for other programs, and theirs for keras_flow.

    format        what it has                        way back
    keras         model, weights, optimizer          import_
    safetensors   weights                            load_weights, import_
    orbax         all tensors, as a tree of names    import_
    dcp           all tensors, flat, by their names  import_(allow_pickle=True): torch writes names and shapes by pickle

One process does it, under no layout. safetensors need memory for one tensor; the others take all tensors at once.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_flow import atomic, progress, units
from keras_flow.checkpoint import manifest, store, weights, writer
from keras_flow.checkpoint.manifest import Manifest, Tensor, is_weight
from keras_flow.checkpoint.reader import Reader
from keras_flow.checkpoint.store import Place
from keras_flow.current import joining
from keras_flow.errors import FlowError

FORMATS = ("keras", "safetensors", "orbax", "dcp")


def export(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str | None = None,
    *,
    step: int | str = "latest",
    custom_objects: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint in a format of other programs.

    Args:
        directory: directory of checkpoints, or one checkpoint's folder.
        out: a file for `"keras"` and `"safetensors"`, a folder for `"orbax"` and `"dcp"`; it is written whole or not
            at all.
        format: one of these four; None: by the ending of `out`.
        step: the number of a checkpoint, or `"latest"`.
        custom_objects: name -> class, for `"keras"`, of layers that Keras does not know.

    Returns:
        The path that was written.

    Raises:
        FlowError: there is no such checkpoint or format, a package is missing, or the model cannot be made again.
    """
    target = Path(out).absolute()
    format = _format(format, target)
    folder, found = manifest.read(store.at(directory), step)
    reader = Reader(folder, found)
    if not target.parent.is_dir():
        raise FlowError(f"there is no folder {str(target.parent)!r} to write {target.name!r} in")
    with atomic.beside(target) as new:
        if format == "keras":
            _write_keras(reader, new, custom_objects)
        elif format == "safetensors":
            _write_file(new, [name for name in found.tensors if is_weight(name)], found.tensors, reader.read)
        elif format == "orbax":
            _write_orbax(reader, new)
        else:
            _write_dcp(reader, new)
    return target


def import_(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    format: str | None = None,
    *,
    step: int = 0,
    allow_pickle: bool = False,
) -> Place:
    """Make a checkpoint of what another program wrote. `load` and `load_weights` then read it under any layout.

    Args:
        path: what `export` writes, or a tree of arrays that Orbax wrote, or tensors that torch's DCP wrote.
        directory: a directory of checkpoints.
        format: as in `export`; None: by what is in `path`.
        step: the number of the checkpoint, which is not there yet.
        allow_pickle: for `"dcp"`: load its `.metadata`, which can run any program. Only for files that you trust.

    Returns:
        The folder of the checkpoint.

    Raises:
        FlowError: nothing that can be read is there, or a package is missing.
    """
    if not manifest.is_count(step, 0):
        raise FlowError(f"step={step!r}: legal is a whole number of at least 0")
    source = Path(path).absolute()
    format = _format(format, source)
    folder = store.at(directory) / manifest.folder_of(step)
    if folder.is_dir():
        raise FlowError(f"{str(folder)!r} is there already; choose another step")
    tensors, read = _READERS[format](source, allow_pickle)
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = store.begun(folder, joining.waiting_seconds())
    try:
        chunks = _write_file(writing / manifest.file_of(0, 1), list(tensors), tensors, read, folder)
        said = Manifest(
            step,
            {
                name: Tensor(tensor.dtype, tensor.shape, "", tuple(chunks.get(name, ())))
                for name, tensor in tensors.items()
            },
            manifest.saved_by(format, 1, 1),
        )
        store.commit(writing, folder, {manifest.NAME: said.to_json()}, ())
    except BaseException:
        store.remove(writing)
        raise
    return folder


def _format(format: str | None, path: Path) -> str:
    if format is None:
        if path.suffix in (".keras", ".safetensors") or path.name.endswith(".index.json"):
            format = "keras" if path.suffix == ".keras" else "safetensors"
        elif (path / ".metadata").is_file():
            format = "dcp"
        elif (path / "_METADATA").is_file() or (path / "_CHECKPOINT_METADATA").is_file():
            format = "orbax"
        elif path.is_dir() and any(path.glob("*.safetensors*")):
            format = "safetensors"
    if format not in FORMATS:
        said = (
            f"format={format!r}"
            if format
            else f"{str(path)!r} does not say which format it has: name it by --format, or format="
        )
        raise FlowError(
            f"{said}; it is one of {', '.join(map(repr, FORMATS))}. A name that ends in .keras or .safetensors says it"
        )
    return format


# ---- writing


def _write_file(
    path: Place,
    names: list[str],
    tensors: Mapping[str, Tensor],
    read: Callable[[str], np.ndarray],
    folder: Place | None = None,
) -> dict[str, list[manifest.Chunk]]:
    """Write whole tensors into one file of safetensors, one after the other; return their chunks."""
    shapes = {name: tensors[name].shape for name in names if 0 not in tensors[name].shape}
    blocks = [
        writer.FileBlock(name, tensors[name].dtype, (0,) * len(shape), shape, shape) for name, shape in shapes.items()
    ]
    file = writer.File(path, blocks, folder)
    try:
        with progress.working(f"writing {units.amount(sum(block.bytes for block in blocks))}") as say:
            for block in blocks:
                say(block.name)
                file.add(block, read(block.name))
    finally:
        file.close(True)
    return file.chunks


def _write_keras(reader: Reader, path: Path, custom_objects: Mapping[str, Any] | None) -> None:
    import keras

    from keras_flow.checkpoint import loading

    if path.suffix != ".keras":
        raise FlowError(f"Keras writes files that end in .keras; this one is {path.name!r}")
    try:
        config = json.loads((reader.folder / manifest.MODEL).read_text(encoding="utf-8"))
    except OSError as error:
        raise FlowError(
            f"{str(reader.folder)!r} has weights and no model: Keras could not serialize it when it was saved (a class "
            "without get_config). Build the model, kf.checkpoint.load into it, and save it"
        ) from error
    try:
        model = keras.saving.deserialize_keras_object(config, dict(custom_objects or {}))
    except Exception as error:
        raise FlowError(f"the model cannot be made again: {error}. Give its classes as custom_objects=") from error
    loading.fill_model(model, reader, f"{str(reader.folder)!r} does not fit its {manifest.MODEL}")
    model.save(path)


def _write_orbax(reader: Reader, path: Path) -> None:
    tree: dict[str, Any] = {}
    for name, tensor in reader.manifest.tensors.items():
        if 0 in tensor.shape:  # Orbax saves none of these
            continue
        *folders, last = name.split("/")
        place = tree
        for each in folders:
            place = place.setdefault(each, {})
        place[last] = reader.read(name)
    with _package("orbax.checkpoint", "orbax-checkpoint").PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _write_dcp(reader: Reader, path: Path) -> None:
    torch = _package("torch", "torch")
    dcp = _package("torch.distributed.checkpoint", "torch")
    state = {}
    for name, tensor in reader.manifest.tensors.items():
        state[name] = _to_torch(torch, reader.read(name), tensor.dtype)
    with warnings.catch_warnings(action="ignore"):  # that there is one process, as is meant
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def _to_torch(torch: Any, value: np.ndarray, dtype: str) -> Any:
    """A tensor with the elements of an array; NumPy's own types of torch's dtypes are not all known to torch."""
    known = np.ascontiguousarray(value).reshape(value.shape)
    if known.dtype.kind == "V" or dtype.startswith(("bfloat16", "float8")):
        return torch.from_numpy(known.view(f"u{known.dtype.itemsize}")).view(getattr(torch, dtype))
    return torch.from_numpy(known)


# ---- reading

#: names with shapes, and what reads each
_Tensors = tuple[Mapping[str, Tensor], Callable[[str], np.ndarray]]


def _of_arrays(arrays: Mapping[str, np.ndarray]) -> _Tensors:
    tensors = {name: Tensor(value.dtype.name, value.shape, "", ()) for name, value in arrays.items()}
    return tensors, arrays.__getitem__


def _read_keras(path: Path, allow_pickle: bool) -> _Tensors:
    import keras

    from keras_flow.checkpoint import names

    model: Any = keras.saving.load_model(path)
    return _of_arrays({name: np.asarray(variable) for name, variable in names.named(model).items()})


def _read_safetensors(path: Path, allow_pickle: bool) -> _Tensors:
    found = weights.tensors_in(path)
    return found.tensors, Reader(path.parent, found, check=False).read


def _read_orbax(path: Path, allow_pickle: bool) -> _Tensors:
    with _package("orbax.checkpoint", "orbax-checkpoint").PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(path)
    return _of_arrays({name: np.asarray(value) for name, value in _leaves(tree)})


def _leaves(tree: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, each in tree.items():
            yield from _leaves(each, f"{before}{name}/")
    elif isinstance(tree, list | tuple):
        for number, each in enumerate(tree):
            yield from _leaves(each, f"{before}{number}/")
    elif tree is not None:
        yield before.removesuffix("/"), tree


def _read_dcp(path: Path, allow_pickle: bool) -> _Tensors:
    if not allow_pickle:
        raise FlowError(
            f"{str(path / '.metadata')!r} is a pickle, which can run any program when it is read. If you trust who "
            "wrote it: allow_pickle=True"
        )
    torch = _package("torch", "torch")
    dcp = _package("torch.distributed.checkpoint", "torch")
    said = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: each for name, each in said.items() if hasattr(each, "size")}
    tensors = {
        name: Tensor(str(each.properties.dtype).removeprefix("torch."), tuple(each.size), "", ())
        for name, each in sizes.items()
    }

    def read(name: str) -> np.ndarray:
        state = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype)}
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        dtype = manifest.numpy_dtype(tensors[name].dtype)
        value = state[name]
        if dtype.kind == "V":
            return value.view(getattr(torch, f"uint{8 * dtype.itemsize}")).numpy().view(dtype)
        return value.numpy()

    return tensors, read


_READERS = {"keras": _read_keras, "safetensors": _read_safetensors, "orbax": _read_orbax, "dcp": _read_dcp}


def _package(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FlowError(f"this format needs {package}: pip install {package}") from error
