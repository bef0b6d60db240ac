"""Roles of the processes of a job with parameter servers: chief, worker or server, as `TF_CONFIG` says.

The chief runs the program. Workers and servers wait for it: they hold a connection to the chief's address, and end when
that is closed, however the chief ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_flow.backends.active import backend, checked_name
from keras_flow.backends.engines import ENGINES, in_words
from keras_flow.current import tf_config
from keras_flow.errors import FlowError

_EXAMPLE = (
    '{"cluster": {"chief": ["host0:20000"], "worker": ["host1:20001", "host2:20001"], "ps": ["host0:20002"]}, '
    '"task": {"type": "chief", "index": 0}}'
)
#: seconds of silence until the system asks another host, between two questions, and questions without an answer
_ASKING = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
#: what a process is called in messages
_WORDS = {"chief": "chief", "worker": "worker", "ps": "parameter server"}


@dataclass(frozen=True)
class Role:
    """A process of a job with parameter servers.

    Attributes:
        job: `"chief"`, `"worker"` or `"ps"`.
        index: its number among those.
        cluster: job -> the addresses of its processes, `host:port`.
    """

    job: str
    index: int
    cluster: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name of the process in messages: "chief", "worker 1"."""
        return _WORDS[self.job] if self.job == "chief" else f"{_WORDS[self.job]} {self.index}"


def find(environment: Mapping[str, str] | None = None) -> Role | None:
    """The role that `TF_CONFIG` gives this process; None where its cluster has no parameter servers.

    Raises:
        FlowError: it cannot be read, or names no chief, no worker, or a process that is not there.

    Example:
        >>> import json
        >>> cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["a:2"]}
        >>> text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
        >>> find({"TF_CONFIG": text}).name
        'worker 1'
    """
    config = tf_config.read(os.environ if environment is None else environment)
    if config is None or not config.cluster.get("ps"):
        return None
    cluster, job, index = config.cluster, config.job, config.index
    missing = [f"no {job}" for job in ("chief", "worker") if not cluster.get(job)]
    if missing:
        raise FlowError(f"TF_CONFIG names parameter servers and {' and '.join(missing)}; legal is {_EXAMPLE}")
    if job not in _WORDS or not 0 <= index < len(cluster[job]):
        there = ", ".join(f"{len(cluster[job])} {job}" for job in _WORDS)
        raise FlowError(f"TF_CONFIG says this process is {job} {index}; its cluster has {there}; legal is {_EXAMPLE}")
    return Role(job, index, {job: cluster[job] for job in _WORDS})


def listen(role: Role) -> None:
    """Accept, in the chief, the connections that tell the others that it lives; they end with this process.

    Raises:
        FlowError: the chief's address is in use.
    """
    address = role.cluster["chief"][0]
    try:
        listener = socket.create_server(tf_config.where_to_listen(address), backlog=128)
    except OSError as error:
        raise FlowError(f"TF_CONFIG gives the chief {address}, where it cannot listen: {error.strerror}") from None
    held: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()


def await_others(role: Role, seconds: float) -> None:
    """Wait, in the chief, until all workers and servers listen.

    Raises:
        FlowError: naming those that do not after these seconds.
    """
    silent = {(job, index): address for job in ("ps", "worker") for index, address in enumerate(role.cluster[job])}
    until = time.monotonic() + seconds
    while True:
        silent = {key: address for key, address in silent.items() if not _answers(address)}
        if not silent:
            return
        if time.monotonic() > until:
            named = ", ".join(f"{_WORDS[job]} {index} ({address})" for (job, index), address in silent.items())
            raise FlowError(
                f"nobody listens as {named} after {seconds:g} s: start this program there with its TF_CONFIG, or all "
                "of the job with `keras-flow launch --servers 1 --workers 2 train.py`"
            )
        time.sleep(0.1)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def await_chief(role: Role, seconds: float) -> None:
    """Wait, in a worker or server, until the chief has ended.

    Raises:
        FlowError: no chief listens after these seconds.
    """
    host, _, port = role.cluster["chief"][0].rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, int(port)), 1.0) as connection:
                connection.settimeout(None)  # as long as the chief lives, which the system watches
                _keep_asking(connection)
                with contextlib.suppress(OSError):
                    connection.recv(1)
                return
        except OSError:
            if time.monotonic() > until:
                raise FlowError(
                    f"{role.name} waited {seconds:g} s for the chief at {host}:{port}, which is not there"
                ) from None
            time.sleep(0.1)


def _keep_asking(connection: socket.socket) -> None:
    """Let the system ask whether the other host is there: its own habit (Linux) is to begin after two hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ASKING.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def serve(role: Role, seconds: float) -> None:
    """Serve, in a worker or server, until the chief has ended, then end this process.

    Raises:
        FlowError: no chief listens after these seconds, or the engine has no servers.
    """
    refuse_engine()
    engine: Any = backend()
    engine.serve(role.cluster, role.job, role.index)
    await_chief(role, seconds)
    # TensorFlow's server has no end, and waits for calls of a chief that is gone
    os._exit(0)


def refuse_engine() -> None:
    """Refuse an engine that has no parameter servers.

    Raises:
        FlowError: naming what it has instead.
    """
    name = checked_name()
    if not ENGINES[name].has_servers:
        able = in_words([each for each, engine in ENGINES.items() if engine.has_servers])
        raise FlowError(
            f"kf.ParameterServer needs an engine that has parameter servers, {able}; {name} has none. "
            "kf.CentralStorage() holds variables once on every engine, kf.DataParallel(zero=3) a part on each rank"
        )
