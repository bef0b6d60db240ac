"""What this process last entered that waits for other processes: kept where its launcher finds it after a failure.

A page of memory that a file of the job's folder stands for: written in a microsecond, and there when the process was
killed.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_LENGTH = 256

_page: mmap.mmap | None = None


def open_page(path: Path) -> None:
    """Keep it in this file from now on."""
    global _page
    path.write_bytes(bytes(_LENGTH))
    with path.open("r+b") as file:
        _page = mmap.mmap(file.fileno(), _LENGTH)


def enter(text: str) -> None:
    """A collective, or a step that has collectives in it, begins."""
    if _page is not None:
        _page[:] = text.encode()[:_LENGTH].ljust(_LENGTH, b"\0")


def read(path: Path) -> str:
    """What the process of this file last entered; empty where it entered nothing, or keeps nothing."""
    try:
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except FileNotFoundError:
        return ""
