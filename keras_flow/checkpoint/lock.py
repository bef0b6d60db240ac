"""One job writes checkpoints in a directory: others are told, before they mix their steps with its own.

The lock is the system's (`flock` on the directory), so that nothing is left of a process that is killed. It holds among
the processes of a host, and of several hosts where the file system passes it on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from keras_flow.checkpoint.store import Place
from keras_flow.errors import FlowError

#: seconds for processes that a killed job has left (workers that read data) to end
WAITED = 5.0

#: directory -> the descriptor that has the lock, and how often this process holds it
_held: dict[Path, tuple[int, int]] = {}
#: the thread that writes a checkpoint gives its hold back while `fit` or another `save` takes one
_changing = threading.Lock()


@contextlib.contextmanager
def held(directory: Place) -> Iterator[None]:
    """Hold the lock of a directory that exists.

    Raises:
        FlowError: another job holds it.
    """
    if not isinstance(directory, Path):  # a store has no locks
        yield
        return
    directory = directory.resolve()  # a link to it is the same one
    with _changing:
        descriptor, count = _held.get(directory) or (_locked(directory), 0)
        _held[directory] = (descriptor, count + 1)
    try:
        yield
    finally:
        with _changing:
            descriptor, count = _held[directory]
            if count > 1:
                _held[directory] = (descriptor, count - 1)
            else:
                del _held[directory]
                os.close(descriptor)


def _locked(directory: Path) -> int:
    descriptor, until = os.open(directory, os.O_RDONLY), time.monotonic() + WAITED
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
                return descriptor
            if time.monotonic() > until:
                os.close(descriptor)
                raise FlowError(
                    f"another job writes checkpoints in {str(directory)!r}, and they would be mixed: give each job a "
                    "directory of its own, or wait until the other has ended"
                ) from error
        time.sleep(0.05)
