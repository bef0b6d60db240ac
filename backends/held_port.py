"""Another port for an engine's coordinator, where the launcher itself listens at MASTER_PORT.

torchrun's agent listens there, with a store for the processes. torch uses that store. The other engines have
coordinators of their own, which need a port: process 0 chooses one, and tells it to the others through the store.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from keras_flow.current import joining
from keras_flow.current.processes import Processes
from keras_flow.errors import FlowError

#: reads and writes the store, in a process of its own: loading torch beside another engine costs memory and time
_SCRIPT = Path(__file__).with_name("torch") / "agent_store.py"
_KEY = "keras_flow/coordinator"
#: seconds that the other process takes to start
_STARTING_SECONDS = 60.0


def settled(described: Processes, seconds: float) -> Processes:
    """Give the processes a coordinator of their own, where the launcher holds the port that they were told of.

    Raises:
        FlowError: torch is not installed beside this engine, or process 0 did not say an address in time.
    """
    if not described.port_is_held:
        return described
    if importlib.util.find_spec("torch") is None:
        raise FlowError(
            f"torchrun holds {described.coordinator} and tells processes of its store, which torch alone can read, and "
            "torch is not installed here. Install it, or start the processes with keras-flow launch."
        )
    if described.index == 0:
        address = _free_address(described)
        _ask(described, seconds, "set", _KEY, address)
    else:
        address = _ask(described, seconds, "get", _KEY)
    host, _, port = address.rpartition(":")
    return replace(described, host=host, port=int(port), port_is_held=False)


def _free_address(described: Processes) -> str:
    """A free port of this host, at the coordinator's name where that is one of this host, else at its address."""
    for host in (described.host, joining.own_address(described)):
        with socket.socket(joining.family_of(host)) as probe:
            try:
                probe.bind((host, 0))
            except OSError:
                continue
            return f"{host}:{probe.getsockname()[1]}"
    raise FlowError(f"process 0 finds no free port at {described.host}, nor at its own address.")


def _ask(described: Processes, seconds: float, *action: str) -> str:
    command = [sys.executable, "-P", str(_SCRIPT), str(described.index), str(described.count), f"{seconds:g}", *action]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + _STARTING_SECONDS, check=True
        ).stdout.split()
    except subprocess.TimeoutExpired as error:
        raise FlowError(joining.cannot_join(described, seconds, error)) from error
    except subprocess.CalledProcessError as error:
        cause = RuntimeError((error.stderr.strip().splitlines() or ["no word"])[-1])
        raise FlowError(joining.cannot_join(described, seconds, cause)) from error
    return done[-1] if done else ""
