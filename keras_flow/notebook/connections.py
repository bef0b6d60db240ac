"""Cuts the connections between ranks, so that one that waits for another in a collective gets an error and goes on."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

import psutil


def cut(peers: Sequence[int], coordinator: int) -> int:
    """Close this process's TCP connections to others of its job, but for those to the job's store.

    A thread that is stuck in a collective cannot be told anything else: it runs no Python until its engine returns,
    which it does when the other side is gone.

    Args:
        peers: process numbers of the other ranks.
        coordinator: port of the job's store, which is left alone: the ranks find each other there again.

    Returns:
        How many were closed.
    """
    theirs = {address.port for pid in peers for address in _local_addresses(pid)}
    closed = 0
    for connection in psutil.Process().net_connections(kind="tcp"):
        # an empty address: it listens, or is closed
        if not connection.raddr or not connection.laddr or connection.raddr.port not in theirs:
            continue
        if coordinator in (connection.laddr.port, connection.raddr.port):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
            closed += 1
    return closed


def _local_addresses(pid: int) -> list[psutil._common.addr]:  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(psutil.Error):
        return [each.laddr for each in psutil.Process(pid).net_connections(kind="tcp") if each.raddr]
    return []
