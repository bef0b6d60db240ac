"""Several processes on JAX: joined by its coordination service, whose key-value store holds what they tell each other.

See `keras_flow.backends.rendezvous.agreement` for what that is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import (  # private: JAX has no public name for its key-value store (checked with jax 0.10)
    distributed,
)
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from keras_flow.backends import held_port
from keras_flow.current import joining, processes
from keras_flow.errors import FlowError

#: seconds without a sign of life after which the service tells the others that a process is gone
_HEARTBEAT_SECONDS = 5
#: seconds that a process which is done waits for the others
_PARTING_SECONDS = 5
#: set by users of JAX's preemption service (Orbax saves by it): then it hears SIGTERM, and the process goes on
_SERVICE_VARIABLE = "JAX_ENABLE_PREEMPTION_SERVICE"


def join(described: processes.Processes, local_devices: Sequence[int] | None) -> None:
    """Connect to the coordination service, which process 0 serves at the coordinator's address.

    Not by `keras.distribution.initialize`, which takes no limits of time: a process that dies would be noticed after
    100 seconds.

    Args:
        described: this process, and the others.
        local_devices: numbers of the host's accelerators that this process takes; None: all that it sees.

    Raises:
        FlowError: the coordinator cannot be reached in time.
    """
    if described.count == 1 or distributed.global_state.client is not None:
        return
    limit = joining.joining_seconds()
    described = held_port.settled(described, limit)
    joining.check_port(described)
    try:
        with _own_sigterm():
            jax.distributed.initialize(
                described.coordinator,
                described.count,
                described.index,
                None if local_devices is None else list(local_devices),
                initialization_timeout=int(limit),
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_PARTING_SECONDS,
                # not on all interfaces, as by default
                coordinator_bind_address=described.coordinator,
                cluster_detection_method="deactivate",
            )
    except RuntimeError as error:
        raise FlowError(joining.cannot_join(described, limit, error)) from error
    atexit.register(joining.leave_at_once_after_a_failure)


def _own_sigterm() -> contextlib.AbstractContextManager[None]:
    """Inside, JAX's preemption service may take SIGTERM for good only where the user asks for that service."""
    return contextlib.nullcontext() if _SERVICE_VARIABLE in os.environ else joining.keeping_sigterm()


@contextmanager
def collectives_on(address: str | None) -> Iterator[None]:
    """Inside, JAX's backend for CPUs starts with collectives that listen at an address, and not at the host's name.

    Private: JAX 0.10 has no option for it.
    """
    original = _jax.make_gloo_tcp_collectives
    if address is not None:
        _jax.make_gloo_tcp_collectives = functools.partial(original, hostname=address)
    try:
        yield
    finally:
        _jax.make_gloo_tcp_collectives = original


def put_text(key: str, text: str) -> None:
    """Write a text into the job's store."""
    _client().key_value_set(key, text)


def first_text(key: str, text: str) -> str:
    """Write a text into the job's store unless there is one; the one that is there then."""
    try:
        put_text(key, text)
    except jax.errors.JaxRuntimeError:
        return get_text(key, joining.waiting_seconds())
    return text


def get_text(key: str, seconds: float) -> str:
    """Read a text from the job's store, waiting until it is there."""
    is_late = lambda error: "DEADLINE_EXCEEDED" in str(error)  # noqa: E731
    return joining.in_short_waits(
        _client().blocking_key_value_get, jax.errors.JaxRuntimeError, is_late, key, jax.process_count(), seconds
    )


def delete_text(key: str) -> None:
    """Remove a text from the job's store."""
    _client().key_value_delete(key)


def _client() -> Any:
    return distributed.global_state.client
