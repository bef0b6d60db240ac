"""Several processes on TensorFlow: clients of one DTensor system, each a gRPC server of its own.

TensorFlow's coordination service, which the first of them runs, holds what they tell each other; see
`keras_flow.backends.rendezvous.agreement` for what that is.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context  # pyright: ignore[reportMissingImports]

from keras_flow.backends import held_port
from keras_flow.current import channel, joining, processes
from keras_flow.errors import FlowError

#: milliseconds without a sign of life after which the service tells the others that a process is gone
_HEARTBEAT_MILLISECONDS = 4000
#: milliseconds that a process which is done waits for the others
_PARTING_MILLISECONDS = 5000
#: TensorFlow's name of the processes
JOB = "worker"

#: this process, once it has joined others
_joined: processes.Processes | None = None


def join(described: processes.Processes, type: str) -> None:
    """Start this process's server and connect it to those of the others.

    Raises:
        FlowError: the others cannot be reached in time.
    """
    global _joined
    if described.count == 1 or _joined is not None:
        return
    limit = joining.joining_seconds()
    described = held_port.settled(described, limit)
    found = described.addresses or _exchanged_addresses(described, limit)
    # the only way to tell DTensor; its C++ code also reads them
    os.environ.update(
        DTENSOR_CLIENT_ID=str(described.index),
        DTENSOR_NUM_CLIENTS=str(described.count),
        DTENSOR_JOB_NAME=JOB,
        DTENSOR_JOBS=",".join(found),
    )
    try:
        with joining.keeping_sigterm(), _short_limits(limit):
            dtensor.initialize_accelerator_system(type.upper())
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise FlowError(joining.cannot_join(described, limit, error)) from error
    _joined = described
    atexit.register(joining.leave_at_once_after_a_failure)


def joined() -> processes.Processes:
    """The processes that have joined; this one alone where there are no others."""
    return _joined or processes.Processes()


def addresses() -> tuple[str, ...]:
    """`host:port` of the server of each process."""
    return tuple(os.environ["DTENSOR_JOBS"].split(","))


def put_text(key: str, text: str) -> None:
    """Write a text into the job's store."""
    _context().set_config_key_value(key, text)


def first_text(key: str, text: str) -> str:
    """Write a text into the job's store unless there is one; the one that is there then."""
    try:
        put_text(key, text)
    except tf.errors.AlreadyExistsError:
        return get_text(key, joining.waiting_seconds())
    return text


def get_text(key: str, seconds: float) -> str:
    """Read a text from the job's store, waiting until it is there."""
    is_late = lambda error: isinstance(error, tf.errors.DeadlineExceededError)  # noqa: E731
    return joining.in_short_waits(
        _context().get_config_key_value, tf.errors.OpError, is_late, key, joined().count, seconds
    )


def delete_text(key: str) -> None:
    """Remove a text from the job's store."""
    _context().delete_config_key_value(key)


def _context() -> Any:
    return context.context()  # private: TensorFlow has no public name for its key-value store (checked with 2.21)


@contextmanager
def _short_limits(seconds: float) -> Iterator[None]:
    """Inside, the coordination service is configured to notice a process that dies sooner than by default.

    Private: no function of TensorFlow 2.21 that starts a cluster takes these limits.
    """
    original = context.Context.configure_coordination_service

    @functools.wraps(original)
    def configure(self: Any, **options: Any) -> None:
        options["cluster_register_timeout_in_ms"] = int(seconds * 1000)
        options["heartbeat_timeout_in_ms"] = _HEARTBEAT_MILLISECONDS
        options["shutdown_barrier_timeout_in_ms"] = _PARTING_MILLISECONDS
        original(self, **options)

    context.Context.configure_coordination_service = configure
    try:
        yield
    finally:
        context.Context.configure_coordination_service = original


def _exchanged_addresses(described: processes.Processes, limit: float) -> tuple[str, ...]:
    """`host:port` of the server that each process will start, collected by process 0 at the coordinator's address.

    Every TensorFlow server must know all others before it starts, and a launcher names the coordinator only.
    """
    joining.check_port(described)
    # held until all have chosen: the system gives a port that was let go to the next process that asks
    with socket.socket() as held:
        held.bind(("", 0))
        port = held.getsockname()[1]
        try:
            if described.index == 0:
                return _collected_addresses(described, port, limit)
            hello = {"index": described.index, "port": port}
            coordinator = channel.connect(described.host, described.port, joining.token(), hello, limit)
            answer = coordinator.receive(limit)
            if answer is None:
                raise ConnectionError("the coordinator did not answer")
            return tuple(answer["addresses"])
        except ConnectionError as error:
            raise FlowError(joining.cannot_join(described, limit, error)) from error


def _collected_addresses(described: processes.Processes, port: int, limit: float) -> tuple[str, ...]:
    until = time.monotonic() + limit
    addresses = {0: f"{described.host}:{port}"}
    others = []
    with channel.Listener(described.host, described.port, joining.token()) as listener:
        while len(addresses) < described.count:
            try:
                other, hello = listener.arrivals.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(described.count)) - set(addresses))
                raise ConnectionError(f"processes {missing} did not come") from None
            if hello["index"] in addresses:
                raise FlowError(f"two processes of the job are process {hello['index']} of {described.count}.")
            addresses[hello["index"]] = f"{other.remote_host()}:{hello['port']}"
            others.append(other)
        everyone = [addresses[index] for index in range(described.count)]
        for other in others:
            other.send({"addresses": everyone})
            other.close()
    return tuple(everyone)
