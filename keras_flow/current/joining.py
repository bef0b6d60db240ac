"""How the processes of a job find each other: limits of time, the job's secret, addresses, and what errors say.

The engines' `processes.py` join by their own runtimes, and share this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from keras_flow import settings
from keras_flow.current.processes import Processes
from keras_flow.errors import FlowError

Result = TypeVar("Result")

#: seconds that everything which waits for other processes may take, unless KERAS_FLOW_TIMEOUT says so; the engines' own
DEFAULT_TIMEOUT = 1800.0
#: seconds in which the processes of a job find each other, at most
_JOINING_SECONDS = 300.0
#: seconds of one wait for a text of another process
_WAIT_SECONDS = 1.0
#: failures of the job's store, one after the other, of which the last one is raised
_STORE_FAILURES = 3

#: how the error begins of a process that waited for the one that writes files, which has failed
WRITER_FAILED = "process 0, which writes the files of all processes, failed"


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Inside, an engine's runtime may handle SIGTERM; afterwards the signal does what it did before.

    The coordination services of JAX and TensorFlow note the time of a SIGTERM, for programs that ask for it. A process
    of any other program would go on as if it had not been asked to end.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None: the handler is not Python's. Outside of the main thread Python sets none
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def waiting_seconds() -> float:
    """Seconds that a process may wait for another one."""
    return settings.seconds(settings.TIMEOUT, DEFAULT_TIMEOUT)


def joining_seconds() -> float:
    """Seconds in which the processes of a job must have found each other."""
    return max(1.0, min(_JOINING_SECONDS, waiting_seconds()))


def cannot_join(processes: Processes, seconds: float, error: BaseException) -> str:
    """The text of the error for a job whose processes do not find each other."""
    who = "listen at" if processes.index == 0 else "reach"
    return (
        f"process {processes.index} of {processes.count} could not {who} the coordinator {processes.coordinator} "
        f"within {seconds:g} s ({_cause(error)}). Were all {processes.count} processes started, with the same address, "
        "and is the port free there and open between the hosts? MASTER_ADDR and MASTER_PORT name it (keras-flow launch "
        "--master_addr, --master_port)."
    )


def in_short_waits(
    ask: Callable[[str, int], str],
    failure: type[Exception],
    is_late: Callable[[Exception], bool],
    key: str,
    count: int,
    seconds: float,
) -> str:
    """Wait for a text of another process in short waits, since a process hears no signal within one.

    Args:
        ask: the text of a key, from the engine's store; how many milliseconds it waits for it.
        failure: class of the engine's errors.
        is_late: whether such an error says that nothing came in time.
        key: ends with the number of the other process.
        count: how many processes there are.
        seconds: to wait in all.

    Raises:
        SilentProcess: it did not come.
        LostStore: the store fails, which is no word on the other process.
    """
    until, failures, wait = time.monotonic() + seconds, 0, min(seconds, _WAIT_SECONDS)
    while True:
        try:
            return ask(key, int(1000 * wait))
        except failure as error:
            failures = 0 if is_late(error) else failures + 1
            if failures == _STORE_FAILURES:
                raise LostStore(key, error) from error
            if time.monotonic() >= until and not failures:
                raise SilentProcess(int(key.rpartition("/")[2]), count, seconds, error) from error
        if failures:  # which come at once
            time.sleep(wait)


class SilentProcess(FlowError):
    """Another process does not answer this one.

    Attributes:
        process: its number. Process 0 asks all others, which wait for process 0 alone.
    """

    def __init__(self, process: int, count: int, seconds: float, error: BaseException) -> None:
        super().__init__(
            f"process {process} of {count} did not answer within {seconds:g} s ({_cause(error)}). Every process must "
            "run the same program: look for a branch that only some of them take."
        )
        self.process = process
        self.__cause__ = error


class LostStore(FlowError):
    """The job's store, through which its processes find each other, fails."""

    def __init__(self, key: str, error: BaseException) -> None:
        super().__init__(
            f"the job's store, which process 0 keeps, failed as it was asked for {key!r} "
            f"({_cause(error)}). Look for an error of process 0, or in the network between the hosts."
        )


def _cause(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def too_late(processes: Processes, engine: str, causes: str) -> str:
    """The text of the error for an engine that started before it knew of the other processes."""
    return (
        f"this is {processes}, but {engine} was already initialized as a process on its own: {causes} does that. Call "
        "kf.init() before the first of these."
    )


def own_share(devices: int | None, processes: Processes) -> int | None:
    """How many of `devices` ranks a process drives; None where nobody said how many there are.

    Raises:
        FlowError: the ranks cannot be divided by the processes.
    """
    if devices is None:
        return None
    if devices % processes.count:
        raise FlowError(
            f"kf.init was asked for {devices} ranks in {processes.count} processes ({processes.source}), which drive "
            f"equally many each. Ask for a multiple of {processes.count}."
        )
    return devices // processes.count


def own_address(processes: Processes) -> str:
    """The address of this host on the network of the coordinator: where the other processes reach this one.

    The name of a host, which engines go by, often means another network, or the loopback interface.

    Raises:
        FlowError: the coordinator's name is not known within the time in which processes join.
    """

    def address() -> str:
        with socket.socket(family_of(processes.host), socket.SOCK_DGRAM) as probe:
            probe.connect((processes.host, processes.port))  # of datagrams: nothing is sent
            return probe.getsockname()[0]

    seconds = joining_seconds()
    try:
        return once_known(address, seconds, OSError)
    except OSError as error:
        raise FlowError(cannot_join(processes, seconds, error)) from error


def once_known(ask: Callable[[], Result], seconds: float, unknown: type[OSError] = socket.gaierror) -> Result:
    """What a function returns that needs the name of a host, which may get it later than its programs start."""
    until = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except unknown:
            if time.monotonic() > until:
                raise
            time.sleep(_WAIT_SECONDS)


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a socket to or at a host: IPv6 where its address is one, otherwise IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_port(processes: Processes) -> None:
    """Check, in process 0, that the coordinator's port is free: an engine may abort where somebody listens there.

    Raises:
        FlowError: the port is in use, or the address is none of this host.
    """
    if processes.index != 0:
        return
    with socket.socket(family_of(processes.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            once_known(lambda: probe.bind((processes.host, processes.port)), joining_seconds())
        except OSError as error:
            raise FlowError(
                f"process 0 cannot listen at {processes.coordinator}, the coordinator's address: {error.strerror}. "
                "Choose another port (MASTER_PORT; keras-flow launch --master_port), or the address of this host "
                "(MASTER_ADDR; --master_addr)."
            ) from error


def token() -> bytes:
    """The job's secret, by which its processes know each other where an engine has no means of its own."""
    return (settings.read(settings.TOKEN) or "keras_flow").encode()


def leave_at_once_after_a_failure() -> None:
    """Leave at exit: an engine would wait for processes that are inside a collective with this one, and then abort."""
    if getattr(sys, "last_value", None) is not None:
        leave_at_once()


def leave_at_once() -> NoReturn:
    """End the process with the program's exit status, without what an engine does at exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    failure = getattr(sys, "last_value", None)
    status = failure.code if isinstance(failure, SystemExit) else None
    os._exit(status if isinstance(status, int) else int(failure is not None))
