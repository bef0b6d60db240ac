"""Files that are written beside their name and renamed: whoever is killed at any moment leaves the old one or the new.

Everything that keras_flow writes for a user, and what Keras writes under a distribution, comes through here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import psutil

#: folders in which files are written begin so, then host and container, the process, the second of its start, a number
_PREFIX = ".keras-flow-writes-"
#: how the name of the old folder ends, after the name of its writer's folder, while there is none of its own name
_OLD = ".keras-flow-old"
#: seconds after which a folder of another host, whose processes cannot be seen from here, is left over
_FORGOTTEN_SECONDS = 24 * 3600.0
#: of Linux's renameat2: two names change places, in one step
_EXCHANGE = 2
#: a folder in which this user may make nothing
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_HERE = -100

_numbers = itertools.count()
#: what collects the files that are written inside `noting`
_notes: ContextVar[list[Path] | None] = ContextVar("keras_flow_atomic_notes", default=None)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text to `path`, in UTF-8; a reader finds the old file or the new one, whole."""
    with beside(path) as new:
        new.write_text(text, encoding="utf-8")


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to `path`; a reader finds the old file or the new one, whole."""
    with beside(path) as new:
        new.write_bytes(data)


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give another path, of the same name in a folder beside; what the body writes there becomes `path` at its end.

    The body may write a file or a folder. What it writes beside that, which the file may name (the weights of an ONNX
    model), comes along under its own name, before it. A body that raises leaves `path` as it was. Symbolic links are
    followed, the file keeps its mode, and what is no file (a pipe, a terminal) is written as it is.

    What else is in a folder of this name stays, as where Keras writes into it: its entries are then replaced one after
    the other, and only a process that is killed between two of them leaves some old ones. So are those of a folder that
    cannot be renamed (it is mounted, or the one above it may not be written) or is the working directory.

    A file that may be written in a folder that may not is made elsewhere and copied over the old one, once it is whole:
    only a process that is killed while it copies leaves a part of it.

    Raises:
        OSError: the folder of `path` does not exist, or neither it nor a file of this name can be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "name.txt")
        >>> with beside(path) as new:
        ...     size = new.write_text("whole")
        >>> path.read_text(), [each.name for each in path.parent.iterdir()]
        ('whole', ['name.txt'])
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() or target.is_dir()):
        yield target
        return
    stays = target.is_dir() and (os.path.ismount(target) or not os.access(target.parent, os.W_OK | os.X_OK))
    parent = target if stays else target.parent
    if not parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    if not os.access(parent, os.W_OK | os.X_OK) and not (target.is_file() and os.access(target, os.W_OK)):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    with folder_in(parent) as folder:
        new = folder / target.name
        with _naming(os.fspath(path), new):
            yield new
            for other in sorted(each for each in folder.iterdir() if each != new):
                _put_into(other, target.with_name(other.name))
            if new.exists():
                _put_into(new, target)
                note(path)


@contextlib.contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    """Make a folder in `parent` for what is being written, and remove it at the end, with those of dead writers.

    It is one of the system's temporary folders where `parent` may not be written.
    """
    remove_left_over(parent)
    folder = parent / _name_of_writer()
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _naming(os.fspath(parent), folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _naming(asked: str, hidden: Path) -> Iterator[None]:
    """Let the errors of the body name the path that was asked for, where they name the hidden one."""

    def named(value: object) -> object:
        return value.replace(str(hidden), asked) if isinstance(value, str) else value

    try:
        yield
    except Exception as error:
        error.args = tuple(named(each) for each in error.args)
        for name in ("filename", "filename2"):
            if getattr(error, name, None):  # of an OSError
                setattr(error, name, named(getattr(error, name)))
        raise


def _put_into(new: Path, target: Path) -> None:
    """Move what is written to its name; what else is in a folder there stays."""
    if new.is_dir() and target.is_dir() and not _replaces_all(new, target):
        for each in sorted(new.iterdir()):
            _put_into(each, Path(os.path.realpath(target / each.name)))
    else:
        put(new, target)


def _replaces_all(new: Path, target: Path) -> bool:
    """Whether a folder may take the place of another: nothing is lost, and nobody works in it."""
    if new.is_relative_to(target) or Path.cwd().is_relative_to(target):
        return False
    return all((new / old.relative_to(target)).exists() and not old.is_symlink() for old in target.rglob("*"))


def put(new: Path, target: Path) -> None:
    """Move a file or folder that is written to its name, which may be taken, in one step."""
    if target.exists() and target.is_dir() == new.is_dir():
        os.chmod(new, stat.S_IMODE(target.stat().st_mode))
    if new.is_dir():
        for folder, _, names in os.walk(new):
            for name in names:
                _to_disk(Path(folder, name))
        _exchange_folders(new, target)
    else:
        _to_disk(new)
        try:
            os.replace(new, target)
        except OSError as error:
            # another file system (a temporary folder), or a folder in which this user may not put a name
            if error.errno not in (errno.EXDEV, *_FORBIDDEN) or not target.is_file():
                raise
            shutil.copyfile(new, target)
            _to_disk(target)
    _to_disk(target.parent)


def is_noting() -> bool:
    """Whether this is inside `noting`."""
    return _notes.get() is not None


def note(path: str | os.PathLike[str]) -> None:
    """Say inside `noting` that a file was written."""
    if (notes := _notes.get()) is not None:
        notes.append(Path(path))


@contextlib.contextmanager
def noting() -> Iterator[list[Path]]:
    """Collect the paths of what is written inside."""
    notes: list[Path] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _exchange_folders(new: Path, target: Path) -> None:
    """Put a folder where another one may be, which is then at `new`."""
    if not target.exists():
        os.rename(new, target)
        return
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_HERE, os.fsencode(new), _HERE, os.fsencode(target), _EXCHANGE) == 0:
        return
    # a system or file system without it: for a moment there is no folder, and the old one is beside
    old = target.with_name(f"{target.name}{_name_of_writer()}{_OLD}")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk, where the file system can say so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_left_over(parent: Path) -> None:
    """Remove the folders of writers that were killed."""
    for old in parent.glob(f"*{_PREFIX}*{_OLD}"):
        name, _, writer = old.name.removesuffix(_OLD).rpartition(_PREFIX)
        if not name or _is_written(old, writer):
            continue
        target = old.with_name(name)  # of a writer that was killed between two renames
        with contextlib.suppress(OSError):
            shutil.rmtree(old) if target.exists() else os.rename(old, target)
    for folder in parent.glob(f"{_PREFIX}*"):
        if not _is_written(folder, folder.name.removeprefix(_PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)


def _processes_seen() -> str:
    """Name those whose processes can be seen from here: of this host, and inside this container.

    Containers may have one host name, and give the same numbers to processes.
    """
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _name_of_writer() -> str:
    """A name for a folder of this process."""
    own = psutil.Process()
    return f"{_PREFIX}{_processes_seen()}-{own.pid}-{int(own.create_time())}-{next(_numbers)}"


def _is_written(folder: Path, writer: str) -> bool:
    """Whether the process that made a folder, `writer` in its name, may still be writing."""
    parts = writer.rsplit("-", 3)
    if len(parts) != 4:
        return True  # of somebody else
    host, pid, started, _ = parts
    if host != _processes_seen():
        with contextlib.suppress(OSError):
            found = folder.stat()
            # an old folder was written before: what counts is when it was renamed
            since = found.st_ctime if folder.name.endswith(_OLD) else found.st_mtime
            return time.time() - since < _FORGOTTEN_SECONDS
        return False
    try:
        return abs(psutil.Process(int(pid)).create_time() - int(started)) < 2.0
    except (psutil.Error, ValueError):
        return False
