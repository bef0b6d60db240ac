"""A terminal between a program and the user's, so that the program finds a terminal for its output.

A pipe in its place would take away colours and progress bars: programs ask whether their output is a terminal, and how
wide it is.
"""

from __future__ import annotations

import contextlib
import errno
import os

#: file descriptor of standard error
_ERRORS = 2


def ends() -> tuple[int, int]:
    """Make an end to read and one to write: of a pseudo-terminal where standard error is a terminal.

    Otherwise they are those of a pipe.
    """
    if not os.isatty(_ERRORS):
        return os.pipe()
    import tty  # not on every system that has pipes

    reading, writing = os.openpty()
    tty.setraw(writing)  # bytes pass as they are: the terminal itself makes "\r\n" of a newline
    fit(reading, _ERRORS)
    return reading, writing


def read(reading: int, size: int = 65536) -> bytes:
    """Read what comes next; empty at the end."""
    try:
        return os.read(reading, size)
    except OSError as error:
        if error.errno == errno.EIO:  # how Linux says that nobody can write to a pseudo-terminal any more
            return b""
        raise


def fit(reading: int, number: int) -> None:
    """Give a pseudo-terminal the size of the terminal `number`; a pipe has none."""
    if not os.isatty(reading):
        return
    import termios

    with contextlib.suppress(OSError, termios.error):
        if (size := termios.tcgetwinsize(number)) != termios.tcgetwinsize(reading):
            termios.tcsetwinsize(reading, size)
