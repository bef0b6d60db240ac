"""Shows what the ranks print: rank 0 unchanged and of others nothing, or every line of all with its rank.

The last lines of ranks that are not shown are kept for the error of one that fails.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from keras_flow.errors import LaunchError
from keras_flow.launch import terminal
from keras_flow.launch.noise import Noise, is_known

#: lines kept of a rank whose output is not shown, for the error if it fails
_KEPT_LINES = 200
#: characters after which a line that has no end is taken as one
_LONGEST_LINE = 1 << 14
#: bytes that are no UTF-8 pass through text as they are
_AS_THEY_ARE = "surrogateescape"

_lock = threading.Lock()


@dataclass(frozen=True)
class Shown:
    """Settings for a process's output: what of it is shown, and where it is written.

    Attributes:
        word: what a process is called before each line: `"rank"` or `"process"`.
        every: whether all lines of all processes are shown, behind their rank; otherwise those of process 0, unchanged.
        first: whether this is process 0 of the job.
        hidden: whether nothing is shown.
        folder: the folder where output is also written, to the files `stdout` and `stderr`; None: nowhere.
        append: whether the files are appended to; otherwise they begin anew.
    """

    word: str = "rank"
    every: bool = False
    first: bool = False
    hidden: bool = False
    folder: Path | None = None
    append: bool = False


class RankOutput:
    """The output of one rank: where its process writes to, and what is shown, written or kept of it.

    Args:
        rank: the rank.
        shown: what is shown and written.

    Raises:
        LaunchError: its files cannot be made.
    """

    def __init__(self, rank: int, shown: Shown):
        self._name = f"{shown.word} {rank}"
        self._prefixed = shown.every
        self._shown = (shown.every or shown.first) and not shown.hidden
        self._files: dict[str, BinaryIO] = {}
        if shown.folder is not None:
            mode = "ab" if shown.append else "wb"
            try:
                shown.folder.mkdir(parents=True, exist_ok=True)
                for name in ("stdout", "stderr"):
                    self._files[name] = (shown.folder / name).open(mode)  # type: ignore[assignment]
            except OSError as error:
                raise LaunchError(
                    f"the output of {self._name} cannot be written to {error.filename}: {error.strerror}. Give "
                    "--logdir a folder that may be written."
                ) from error
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._noise = {name: Noise() for name in ("stdout", "stderr")}
        self._pumps: list[threading.Thread] = []
        self._ends: tuple[int, int] | None = None  # of stderr, where it is a terminal's

    def targets(self) -> tuple[IO[bytes] | int | None, IO[bytes] | int | None]:
        """Return stdout and stderr for `subprocess.Popen`; None lets the rank write to the launcher's own."""
        if self._shown and not self._prefixed and not self._files and is_plain(sys.stdout) and is_plain(sys.stderr):
            # a terminal is the launcher's: width, colours and progress bars are as without a launcher
            sys.stdout.flush()
            sys.stderr.flush()
            if os.isatty(2):
                self._ends = terminal.ends()
            return None if os.isatty(1) else subprocess.PIPE, self._ends[1] if self._ends else subprocess.PIPE
        return subprocess.PIPE, subprocess.PIPE

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what `process` writes until it and its children have closed their ends."""
        stderr = process.stderr
        if self._ends is not None:
            reading, writing = self._ends
            os.close(writing)
            stderr = os.fdopen(reading, "rb")
        for source, name in ((process.stdout, "stdout"), (stderr, "stderr")):
            if source is not None:
                pump = threading.Thread(target=self._pump, args=(source, name), daemon=True)
                pump.start()
                self._pumps.append(pump)

    def finish(self, seconds: float = 0.0) -> bool:
        """Wait until everything is passed on; False where it is not after these seconds: a grandchild has the pipe."""
        until = time.monotonic() + seconds
        for pump in self._pumps:
            pump.join(max(0.0, until - time.monotonic()))
        return not any(pump.is_alive() for pump in self._pumps)

    def kept(self) -> str:
        """The last lines that were not shown."""
        return "".join(self._kept)

    def tell_left_out(self) -> None:
        """Show the known lines of engines that were left out: the process has failed, and they may say why."""
        for noise in self._noise.values():
            if told := noise.told():
                _write("stderr", told)

    def _pump(self, source: IO[bytes], name: str) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(_AS_THEY_ARE)
        line = ""
        while True:
            chunk = terminal.read(source.fileno())
            if self._ends is not None and name == "stderr":
                terminal.fit(source.fileno(), 2)
            text = decoder.decode(chunk, final=not chunk)
            self._put_in_file(name, chunk)
            if self._shown and not self._prefixed:
                _write(name, self._noise[name].pass_on(text, last=not chunk))
            else:
                *finished, line = _lines(line + text)
                if line and (not chunk or len(line) > _LONGEST_LINE):
                    finished, line = [*finished, line], ""
                for text in finished:
                    self._show_or_keep(name, text)
            if not chunk:
                break
        source.close()

    def _put_in_file(self, name: str, chunk: bytes) -> None:
        """Write to the file, if there is one; one that cannot be written is left, since the rank waits for its pipe."""
        if (file := self._files.get(name)) is None:
            return
        try:
            file.write(chunk)
            file.flush()
        except OSError as error:
            del self._files[name]
            what = f"{name} of {self._name} is written no further"
            _write("stderr", f"keras-flow: {what}: {file.name}: {error.strerror}\n")
            chunk = b""
        if not chunk:
            with contextlib.suppress(OSError):
                file.close()

    def _show_or_keep(self, name: str, line: str) -> None:
        if is_known(line.rstrip("\r\n")):
            self._noise[name].left_out.append(line.rstrip("\r\n"))
        elif self._shown:
            _write(name, f"[{self._name}] {line.rstrip()}\n")
        else:
            self._kept.append(_legible(line))


def _lines(text: str) -> list[str]:
    r"""The finished lines, each with a newline at its end, and the unfinished rest.

    A carriage return ends a line too: that of a progress bar.

    Example:
        >>> _lines("one\r\rtwo\n\nthree")
        ['one\n', 'two\n', '\n', 'three']
    """
    # a last "\r" may be the first half of "\r\n": it stays in the rest
    *parts, rest = re.split(r"(\r\n|\n|\r(?!\Z))", text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [f"{line}\n" for line, end in pairs if line.strip("\b ") or end != "\r"] + [rest]


def is_plain(stream: TextIO | None) -> bool:
    """Whether `stream` is the process's own, not a notebook's or a test's replacement."""
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return False
    try:
        return stream.fileno() in (1, 2)
    except (OSError, ValueError, io.UnsupportedOperation):
        return False


def _legible(text: str) -> str:
    return text.encode(errors=_AS_THEY_ARE).decode(errors="replace")


def _write(name: str, text: str) -> None:
    stream = sys.stderr if name == "stderr" else sys.stdout
    # a reader that has gone (`| head`) must not stop the pump: otherwise the rank blocks on a full pipe
    with _lock, contextlib.suppress(OSError, ValueError):
        if (binary := getattr(stream, "buffer", None)) is None:  # a notebook's
            stream.write(_legible(text))
        else:
            stream.flush()
            binary.write(text.encode(errors=_AS_THEY_ARE))  # whatever encoding the program chose
        stream.flush()
