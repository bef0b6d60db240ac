"""Known lines of the engines' own libraries that mean nothing, left out of what a job shows.

Only whole lines of a known form and text are left out, so that a line of the program never is. Those that the engine
calls errors are kept, and told where the process fails.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections import deque

from keras_flow.launch import terminal

#: lines that were left out and are told after a failure
_TOLD_LINES = 20
#: what a process writes that is about to fail
_FAILURE = re.compile(r"^(?:Traceback \(most recent call last\):|Fatal Python error)", re.MULTILINE)
#: how lines of absl's log begin, before and after it is set up: level, time, thread, file of C++
_LOG = r"(?:[IWE]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] )"
#: how a line of the log begins that is an error, by its level
_ERROR = re.compile(r"E\d{4} |\d{4}-\d\d-\d\d [\d:.]+: E ")
#: texts of lines that stand in right runs; each says nothing of the program
_TEXTS = (
    r"\S*port\.cc:\d+\] oneDNN custom operations are on\.",
    r"\S*cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized",
    r"\S*\.cc:\d+\] .*(?:Could not find cuda drivers|CUDA_ERROR_NO_DEVICE|failed call to cuInit|not use GPU)",
    r"\S*\.cc:\d+\] .*Unable to register (?:cuDNN|cuFFT|cuBLAS|cuda\w*) (?:factory|plugin)",
    r"\S*\.cc:\d+\] .*(?:computation placer already registered|TF-TRT Warning: Could not find TensorRT)",
    r"op_level_cost_estimator\.cc:\d+\] Incompatible Matrix dimensions$",
    r"coordination_service\.(?:cc|h):\d+\] "
    r"(?:\S+ has connected to|Waiting for \d+/\d+ tasks|Barrier.* passed .*OK$|Initializing CoordinationService$|"
    r"Example stragglers:$)",
    r"coordination_service_agent\.cc:\d+\] Coordination agent has successfully connected\.$",
    r"grpc_server_lib\.cc:\d+\] Started server with target: ",
    r"dtensor_device\.cc:\d+\] DTensor cache key lookup missed for",
    r"\S*\.cc:\d+\] .*[Bb]roadcasting resource tensor",
    r"\S*\.cc:\d+\] Local rendezvous is aborting with status: OUT_OF_RANGE: End of sequence",
)
_KNOWN = re.compile(
    "|".join(
        (
            rf"{_LOG}(?:{'|'.join(_TEXTS)})",
            r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$",
            r"To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.$",
            r"/job:\w+/replica:\d+/task:\d+$",  # what follows on "Example stragglers:"
            r"\t ?\[\[\{\{node \w+\}\}\]\]$",  # the second line of the rendezvous that aborts
            # kf.DistributedDataParallel looks for unused weights unless it is told not to
            r"(?:\[rank\d+\]:)?\[W\d+ \d\d:\d\d:\d\d\.\d+ reducer\.cpp:\d+\] Warning: "
            r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
            r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+$",
        )
    )
)
#: beginnings of an unfinished line that may become a known one; of others the beginning is shown at once
_MAY_BE = re.compile(
    r"[IWE]\d{4} |/job:|WARNING: All log|To enable the foll|\t ?\[\[|\[Gloo\]|\[rank\d+\]:\[W|\[W\d{4} |"
    r"\d{4}-\d\d-\d\d "
)


def is_known(line: str) -> bool:
    """Whether a line, without its end, is a known one that means nothing.

    Example:
        >>> is_known("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR")
        True
        >>> is_known("WARNING: my own")
        False
    """
    return _KNOWN.match(line) is not None


class Noise:
    """Takes known lines out of a stream that comes in pieces.

    Attributes:
        left_out: the last lines that were left out.
    """

    def __init__(self) -> None:
        self.left_out: deque[str] = deque(maxlen=200)
        self._rest = ""
        self._shown_part = False

    def told(self) -> str:
        """Return the last errors that were left out, for the reader of a failure; empty where there are none."""
        lines = [line for line in self.left_out if _ERROR.match(line)][-_TOLD_LINES:]
        if not lines:
            return ""
        return "\n".join(["keras-flow: the last lines of the engine that were left out above:", *lines, ""])

    def pass_on(self, text: str, last: bool = False) -> str:
        """Return what is to be shown now that the next piece of output has come.

        Args:
            text: the piece.
            last: whether it is the last one.
        """
        *lines, rest = (self._rest + text).split("\n")
        shown = []
        for line in lines:
            # a line whose beginning is shown is shown to its end
            if not self._shown_part and is_known(line.rstrip("\r")):
                self.left_out.append(line)
            else:
                shown.append(line + "\n")
            self._shown_part = False
        self._rest = ""
        if rest and (last or self._shown_part or not _MAY_BE.match(rest)):
            shown.append(rest)
            self._shown_part = not last
        else:
            self._rest = rest
        return "".join(shown)


def filter_stderr() -> None:
    """From now on stderr of this process, and of the program that it becomes, passes a process that takes noise out."""
    if os.getpid() == 1:  # of a container, which ends with it: nobody would see the last lines
        return
    reading, writing = terminal.ends()
    if (between := os.fork()) == 0:
        os.close(writing)
        _filter_apart(reading)
    os.waitpid(between, 0)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)


@functools.cache  # once in a process
def filter_stderr_of_engine() -> None:
    """Let stderr pass such a process where an engine may run already: a fork would not have its threads."""
    if os.name != "posix" or os.getpid() == 1:
        return
    sys.stderr.flush()
    reading, writing = terminal.ends()
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it did not start: nothing is taken out
        told = [sys.executable, "-m", "keras_flow.launch.noise"]
        subprocess.run(told, stdin=reading, stdout=subprocess.DEVNULL, check=True)
        os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)


def _filter_apart(reading: int) -> None:
    """Pass stderr on in a grandchild: the program must not find a child that it did not start. Never returns."""
    if os.fork() == 0:
        if reading:
            os.dup2(reading, 0)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)  # who reads the program's output waits for the program alone
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # it ends when nobody can write any more
        with contextlib.suppress(BaseException):
            os.setsid()
            _filter(0, 2)
    os._exit(0)


def _filter(reading: int, writing: int) -> None:
    """Pass on what comes, without noise; of a program that fails also the noise."""
    noise, decoder, has_failed, tail = Noise(), codecs.getincrementaldecoder("utf-8")(errors="replace"), False, ""
    while True:
        chunk = terminal.read(reading)
        terminal.fit(reading, writing)
        text = noise.pass_on(decoder.decode(chunk, final=not chunk), last=not chunk)
        tail = tail[-100:] + text
        has_failed = has_failed or _FAILURE.search(tail) is not None
        if not chunk and has_failed:
            text += noise.told()
        _write(writing, text.encode(errors="replace"))
        if not chunk:
            return


def _write(writing: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more: the program goes on
        while data:
            data = data[os.write(writing, data) :]


if __name__ == "__main__":  # see filter_stderr_of_engine
    _filter_apart(0)
