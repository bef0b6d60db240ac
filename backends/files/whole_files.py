"""Models and weights that Keras writes: beside their name, then renamed, so that a file is the old one or the new.

Weights in several files (`max_shard_size`) are those that their index names. A set that replaces another one takes file
names that the old index does not have, and the index, renamed last, decides which of the two there is.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keras_flow import atomic

#: how the names of models and weights end that Keras writes as one file
_FILES = (".keras", ".h5", ".hdf5")
_INDEX = "weights.json"


def save(original: Callable[..., object], model: object, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Call Keras's `save_model` or `save_weights` with a name beside `filepath`, then rename what it wrote.

    What it refuses, and what is not on a disk (a store, a file object), it is called with as it is.
    """
    asked = inspect.signature(original).bind(model, filepath, *args, **kwargs).arguments
    is_folder = asked.get("zipped") is False
    if not isinstance(filepath, str | os.PathLike) or not _is_local(str(filepath)):
        original(model, filepath, *args, **kwargs)
        return
    path = Path(filepath)
    if is_folder:
        os.makedirs(path.parent, exist_ok=True)
    legal = is_folder or path.name.endswith((*_FILES, _INDEX))
    if not legal or not path.parent.is_dir():
        original(model, filepath, *args, **kwargs)
        return
    if not asked.get("overwrite", True) and path.exists() and not _may_overwrite(path):
        return
    if asked.get("max_shard_size") is None:
        with atomic.beside(path) as new:
            original(model, new, *args, **kwargs)
    else:
        _save_shards(lambda new: original(model, new, *args, **kwargs), path)


def _is_local(path: str) -> bool:
    from keras_flow.current.keras_places import file_utils  # loads Keras

    return not path.startswith("hf://") and not file_utils.is_remote_path(path)


def _may_overwrite(path: Path) -> bool:
    """Ask as Keras does, which finds nothing at the name beside."""
    from keras_flow.current.keras_places import ask_to_overwrite  # loads Keras

    return bool(ask_to_overwrite(path))


def _save_shards(write: Callable[[Path], object], path: Path) -> None:
    """Write weights in several files, then their index."""
    index = path if path.name.endswith(_INDEX) else path.with_suffix(".json")  # as Keras names it
    old = _shards(index)
    with atomic.folder_in(path.parent) as folder:
        write(folder / path.name)
        new = folder / index.name
        names = {name: _other(name, old) for name in _shards(new)}
        content = json.loads(new.read_text(encoding="utf-8"))
        content["weight_map"] = {key: _renamed(value, names) for key, value in content["weight_map"].items()}
        new.write_text(json.dumps(content, indent=4), encoding="utf-8")
        for name, other in names.items():
            atomic.put(folder / name, path.parent / other)
        atomic.put(new, index)
    atomic.note(index)
    # also what a writer that was killed had put there already
    ours = {each.name for name in names for each in path.parent.glob(f"{name.rpartition('_')[0]}_?????b.weights.h5")}
    first = min(names, default="")  # Keras opens the file of this name whatever the index says
    for name in (old | ours) - {first, *names.values()}:
        with contextlib.suppress(OSError):
            os.unlink(path.parent / name)
    if names.get(first, first) != first:
        with atomic.beside(path.parent / first) as link:
            _link(path.parent / names[first], link)


def _link(file: Path, other: Path) -> None:
    """Give a file a second name, or where the file system has none such, a copy."""
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)


def _shards(index: Path) -> set[str]:
    """The files beside an index that it names as Keras does; none where there is no index, or none of Keras's."""
    try:
        found: Iterable[object] = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    names = [name for value in found for name in (value if isinstance(value, list) else [value])]
    # old ones are removed: whoever wrote the index, no file elsewhere and none of another kind
    return {n for n in names if isinstance(n, str) and Path(n).name == n and n.endswith(".weights.h5")}


def _other(name: str, old: set[str]) -> str:
    """A name for a shard that the old set does not use: Keras's, otherwise with a letter.

    Example:
        >>> _other("w_00000.weights.h5", {"w_00000.weights.h5"})
        'w_00000b.weights.h5'
    """
    return name if name not in old else name.replace(".weights.h5", "b.weights.h5")


def _renamed(value: str | list[str], names: dict[str, str]) -> str | list[str]:
    return names[value] if isinstance(value, str) else [names[name] for name in value]
