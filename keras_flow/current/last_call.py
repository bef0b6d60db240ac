"""The last call of this process that waits for others, kept where its launcher finds it after a failure.

It is kept in a memory-mapped file of the job's folder: a write takes a microsecond, and stays when the process is
killed.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_LENGTH = 256

_page: mmap.mmap | None = None


def open_page(path: Path) -> None:
    """Keep the last call in this file from now on."""
    global _page
    path.write_bytes(bytes(_LENGTH))
    with path.open("r+b") as file:
        _page = mmap.mmap(file.fileno(), _LENGTH)


def enter(text: str) -> None:
    """Note that a collective begins, or a step that has collectives."""
    if _page is not None:
        _page[:] = text.encode()[:_LENGTH].ljust(_LENGTH, b"\0")


def read(path: Path) -> str:
    """Return the last call of the process that writes this file; empty where it made none, or keeps none."""
    try:
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except FileNotFoundError:
        return ""
