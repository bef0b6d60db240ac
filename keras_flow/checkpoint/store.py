"""Checkpoints are in a directory, or in a folder of an object store ("s3://bucket/run") by fsspec.

A directory has paths of `pathlib`, a store has `Stored`, with the same methods. What they cannot do alike is told here:

                   directory                               store
    written in     step-N.writing-ID, beside its name      step-N/ID
    commit         the folder is renamed to step-N         step-N/manifest.json, the last file that is written
    written again  the two folders change places           the manifest that is there is replaced, then the old files go
    lock           the system's                            none

So a folder `step-N` without a manifest is no checkpoint, and whoever is killed leaves those that were there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

from keras_flow import atomic
from keras_flow.errors import FlowError

#: what a folder has that is a checkpoint
MANIFEST = "manifest.json"
_UNDER_WAY = ".writing-"


@dataclass(frozen=True)
class Stored:
    """A path in an object store, with the methods of `pathlib.Path` that checkpoints need.

    Attributes:
        files: fsspec's file system.
        path: in it.
    """

    files: Any
    path: str

    def __str__(self) -> str:
        return self.files.unstrip_protocol(self.path)

    def __truediv__(self, name: str) -> Stored:
        return replace(self, path=f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Stored:
        """The path before the last part."""
        return replace(self, path=self.path.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is a file; what other processes have written is seen."""
        self.files.invalidate_cache()
        return self.files.isfile(self.path)

    def is_dir(self) -> bool:
        """Whether there are files under this path."""
        self.files.invalidate_cache()
        return self.files.isdir(self.path)

    def iterdir(self) -> Iterator[Stored]:
        """Yield what is under this path."""
        self.files.invalidate_cache()
        for path in self.files.ls(self.path, detail=False):
            yield replace(self, path=path.rstrip("/"))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a folder, where the store has folders."""
        self.files.makedirs(self.path, exist_ok=True)

    def unlink(self) -> None:
        """Remove a file."""
        self.files.rm_file(self.path)

    def open(self, mode: str) -> IO[bytes]:
        """Open a file; one that is written is there when it is closed."""
        return self.files.open(self.path, mode.replace("x", "w"))

    def read_text(self, encoding: str) -> str:
        """Return what a file holds."""
        return self.files.cat_file(self.path).decode(encoding)


Place: TypeAlias = Path | Stored


def at(directory: str | os.PathLike[str] | Stored) -> Place:
    """Return the path of a directory: in a store where it has a protocol, otherwise an absolute one.

    Raises:
        FlowError: a package for the store is missing, or there is no such protocol.

    Example:
        >>> print(at("memory://run") / "step-00000001")
        memory:///run/step-00000001
    """
    if isinstance(directory, Stored):
        return directory
    text = os.fspath(directory)
    if "://" not in text:
        return Path(text).absolute()
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise FlowError(
            f"{text!r}: {error}. Stores need fsspec and the package of their protocol: pip install "
            "'keras-flow[stores]' s3fs"
        ) from error
    return Stored(files, path.rstrip("/"))


# ---- reading


def read(path: Place, begin: int, end: int) -> bytes:
    """Return the bytes of a file from `begin` to `end`; fewer where it ends before.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(path, Stored):
        return path.files.cat_file(path.path, start=begin, end=end)
    parts = []
    with path.open("rb") as file:
        # the system gives 2 GiB at most at a time
        while part := os.pread(file.fileno(), end - begin, begin):
            parts.append(part)
            begin += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def version(path: Place) -> object:
    """Return what is another one once a file is written again; None where there is none."""
    try:
        if isinstance(path, Stored):
            path.files.invalidate_cache()
            return path.files.ukey(path.path)
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    except FileNotFoundError:
        return None


# ---- writing


def begun(folder: Place, old_seconds: float) -> Place:
    """Make the folder in which the files of a checkpoint are written, and remove those that nobody finished.

    Args:
        folder: the folder of the checkpoint, `step-N`.
        old_seconds: what is as old was left by a job that was killed.

    Raises:
        OSError: it cannot be made.
    """
    number = uuid.uuid4().hex[:8]
    if isinstance(folder, Stored):
        # some stores have no folder before there is a file in it
        for each in folder.parent.iterdir() if folder.parent.is_dir() else ():
            if each.name.startswith("step-") and not (each / MANIFEST).is_file() and _age(each) > old_seconds:
                remove(each)
        writing: Place = folder / number
    else:
        atomic.remove_left_over(folder.parent)
        for left in folder.parent.glob(f"step-*{_UNDER_WAY}*"):
            if time.time() - left.stat().st_mtime > old_seconds:
                remove(left)
        writing = folder.with_name(f"{folder.name}{_UNDER_WAY}{number}")
    writing.mkdir()
    return writing


def _age(folder: Stored) -> float:
    """Seconds since a file in a folder was last written."""
    times = [folder.files.modified(path).timestamp() for path in folder.files.find(folder.path)]
    return time.time() - max(times, default=time.time())


def write_text(path: Place, text: str) -> None:
    """Write a file that others see whole, or not at all."""
    if isinstance(path, Stored):
        # an object appears whole, but a file of file:// or sftp:// is empty at first: only its name appears at once
        part = f"{path.path}.part"
        path.files.pipe_file(part, text.encode())
        path.files.mv(part, path.path)
    else:
        atomic.write_text(path, text)


def name_in(folder: Place, path: Place) -> str:
    """Return the name that a file which is written has in its checkpoint, `folder`."""
    return path.name if isinstance(folder, Path) or path.parent == folder else f"{path.parent.name}/{path.name}"


def commit(writing: Place, folder: Place, texts: Mapping[str, str], notes: Sequence[Place]) -> None:
    """Make a checkpoint of the written files, in place of one that has its name.

    Args:
        writing: where the files are.
        folder: what it is called.
        texts: file -> text, of the last files; the manifest is the last one.
        notes: files that are no part of it.

    Raises:
        OSError, or another error of the store: it could not be written. What fails after it is written is let be.
    """
    if isinstance(folder, Stored):
        for name, text in texts.items():
            try:
                write_text(folder / name, text)
            except Exception:
                # moved, and then something failed: with the manifest the checkpoint is made
                if not (folder / name).is_file() or (folder / name).read_text("utf-8") != text:
                    raise
        with contextlib.suppress(Exception):  # what stays of the old files is no part of the new checkpoint
            left = [each for each in folder.iterdir() if each.name not in (writing.name, *texts)]
            for each in left:
                each.files.rm(each.path, recursive=True)
        for note in notes:  # last: other processes wait for it
            with contextlib.suppress(Exception):
                note.unlink()
    else:
        assert isinstance(writing, Path)
        for name, text in texts.items():
            write_text(writing / name, text)
        for note in notes:
            note.unlink()
        atomic.put(writing, folder)
        remove(writing)  # an older checkpoint of this step, which has changed places with it


def is_over(writing: Place, note: Place) -> bool:
    """Whether a checkpoint that is written has come to its end; the note of a process is removed there."""
    return not (note.is_file() if isinstance(writing, Stored) else writing.is_dir())


def remove(folder: Place) -> None:
    """Remove a folder so that it is no checkpoint from the first moment on; what cannot be removed stays."""
    with contextlib.suppress(Exception):  # stores have errors of their own
        if isinstance(folder, Stored):
            if (folder / MANIFEST).is_file():
                (folder / MANIFEST).unlink()
            folder.files.rm(folder.path, recursive=True)
        else:
            gone = folder.with_name(f"{folder.name}{_UNDER_WAY}removed")
            folder.rename(gone)
            shutil.rmtree(gone)
