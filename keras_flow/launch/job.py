"""`Job`: one command, run as several processes on one host or several."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from keras_flow import settings
from keras_flow.backends import active
from keras_flow.backends.engines import ENGINES
from keras_flow.current.joining import DEFAULT_TIMEOUT
from keras_flow.current.processes import LOOPBACK
from keras_flow.errors import FlowError, LaunchError
from keras_flow.runtime import versions
from keras_flow.units import amount

#: seconds in which the hosts of a job find each other, at most
_MEETING_SECONDS = 300.0


#: bytes of its own that a process has, at least, once it has loaded Keras and an engine
_PROCESS_BYTES = 100_000_000


def require_room(processes: int) -> None:
    """Refuse more processes than this host's memory has room for: they would take the host down with them.

    Raises:
        FlowError: there are too many.
    """
    total = psutil.virtual_memory().total
    if processes * _PROCESS_BYTES > total:
        raise FlowError(
            f"{processes} processes were asked for on this host. Each takes {amount(_PROCESS_BYTES)} or more, and "
            f"the host has {amount(total)}: ask for {total // _PROCESS_BYTES} at most, or use more hosts "
            "(--nnodes)."
        )


@dataclass(frozen=True)
class Place:
    """A process among those of its machine, where each has a launcher of its own (Ray).

    Attributes:
        index: index among them.
        count: their number.
        host: index of the machine.
        hosts: number of machines.
    """

    index: int
    count: int
    host: int
    hosts: int


@dataclass(frozen=True)
class Job:
    """One command, run as several processes.

    Attributes:
        processes: number of processes on this host, the same on every host.
        command: the command and its arguments, the same for every process.
        timeout: seconds without progress after which the job ends.
        show_all: show the output of every process, each line behind `[rank k] `; else that of process 0 only.
        env: environment variables for every process, beyond those of the launcher.
        devices: ranks that a process drives; None: as many as its engine finds.
        nodes: number of hosts.
        node: index of this host.
        host: name or address of host 0.
        port: port of host 0 at which the launchers of several hosts meet; on one host that of the coordinator. None: a
            free one, one host only.
        logs: folder for the output of each process, `local_rank_K/stdout` and `stderr` (several hosts:
            `rank_K`); None: none is written.
        tee: show output that is written to files too.
        restarts: how often all processes are started again after a failure.
        attempt: how often another launcher has started them before.
        script: the file that the command runs, which must be the same on all hosts.
        place: the process that this launcher starts, where others on the same machine start the rest; None: it starts
            all.
    """

    processes: int
    command: Sequence[str]
    timeout: float
    show_all: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = 1
    nodes: int = 1
    node: int = 0
    host: str = LOOPBACK
    port: int | None = None
    logs: Path | None = None
    tee: bool = False
    restarts: int = 0
    attempt: int = 0
    script: Path | None = None
    place: Place | None = None

    @property
    def count(self) -> int:
        """Number of processes on all hosts."""
        return self.nodes * self.processes

    @property
    def first(self) -> int:
        """Index of the first process of this host."""
        return self.node * self.processes

    @property
    def word(self) -> str:
        """The word for a process in messages: "rank" where it drives one, otherwise "process"."""
        return "rank" if self.devices == 1 else "process"

    @property
    def words(self) -> str:
        """The plural of `word`."""
        return "ranks" if self.devices == 1 else "processes"

    @property
    def meeting_seconds(self) -> float:
        """Seconds in which the hosts must have found each other."""
        return max(1.0, min(_MEETING_SECONDS, self.timeout))

    def facts(self) -> dict[str, str]:
        """The facts that must be equal on all hosts: name -> value."""
        installed = {name: versions.installed(name) for name in ("keras", *ENGINES)}
        return {
            "--nnodes": str(self.nodes),
            "--nproc_per_node": str(self.processes),
            "--devices_per_proc": str(self.devices),
            "--max_restarts": str(self.restarts),
            "KERAS_BACKEND": self.env.get("KERAS_BACKEND") or active.checked_name(),
            "Python": platform.python_version(),
            **{name: str(version) for name, version in installed.items()},
            "script": "none" if self.script is None else hashlib.sha256(self.script.read_bytes()).hexdigest()[:12],
        }


def stated_timeout(timeout: float | None) -> float:
    """The timeout of a job in seconds: as given, otherwise KERAS_FLOW_TIMEOUT, otherwise half an hour."""
    text = timeout if timeout is not None else settings.seconds(settings.TIMEOUT, DEFAULT_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"the timeout of a job was given as {text!r}; legal is a number of seconds above 0.")
    return seconds
