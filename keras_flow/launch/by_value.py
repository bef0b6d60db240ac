"""Pickles what `__main__` defines by value, and keeps the file and lines of its source.

cloudpickle replaces the file of every function by `<dynamic-code>`. Tracebacks and warnings of the process that
receives it would then name no file and show no line.
"""

from __future__ import annotations

import io
import linecache
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle


def dumps(value: object) -> bytes:
    """Pickle a value; what can be imported is written by name, what `__main__` defines by value.

    Raises:
        Exception: whatever the `__reduce__` of a part raises.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    # the source of files that are not on disk, for example of a notebook's cells
    lines = {file: list(linecache.getlines(file)) for file in sorted(pickler.files) if not Path(file).is_file()}
    return pickle.dumps((lines, stream.getvalue()))


def loads(data: bytes) -> Any:
    """Unpickle what `dumps` wrote."""
    lines, value = pickle.loads(data)
    for file, text in lines.items():
        linecache.cache[file] = (sum(map(len, text)), None, text, file)
    return pickle.loads(value)


class _Pickler(cloudpickle.Pickler):
    """A pickler that writes the file of each code object, and notes these files."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        self.files.add(obj.co_filename)
        make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](obj)[:2]
        return _made, (make, arguments, obj.co_filename)


def _made(make: Callable[..., types.CodeType], arguments: tuple[object, ...], file: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)
