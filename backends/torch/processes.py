"""Several processes on PyTorch: joined by torch.distributed, whose store holds what they tell each other.

See `keras_flow.backends.rendezvous.agreement` for what that is.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import time

import psutil
import torch
import torch.distributed as torch_distributed

from keras_flow.backends.torch import agent_store
from keras_flow.current import joining, processes
from keras_flow.errors import FlowError

#: the job's store, once this process has joined
_joined: torch_distributed.Store | None = None  # pyright: ignore[reportPrivateImportUsage]


def has_joined() -> bool:
    """Whether this process is in a process group that keras_flow made."""
    return _joined is not None


#: seconds between two looks for a text of another rank
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0002, 0.02
#: seconds that a rank which is done waits for the others before it closes its connections
_PARTING_SECONDS = 3.0


def join(described: processes.Processes, type: str) -> None:
    """Join the process group, whose store process 0 serves at the coordinator's address.

    KERAS_FLOW_TIMEOUT (seconds, 1800 by default) is how long a collective waits for a rank.

    Raises:
        FlowError: the coordinator cannot be reached in time.
    """
    global _joined
    if "OMP_NUM_THREADS" not in os.environ:  # the ranks of one host share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // described.local_count))
    # what everything that waits is limited by
    limit = datetime.timedelta(seconds=joining.waiting_seconds())
    start_limit = datetime.timedelta(seconds=joining.joining_seconds())
    engine = "gloo" if type == "cpu" else "cpu:gloo,cuda:nccl"
    if not described.port_is_held:
        joining.check_port(described)
    _use_network_of(joining.own_address(described))
    try:
        if described.port_is_held:
            store = agent_store.connect(described.index, described.count, start_limit.total_seconds())
        else:
            store = torch_distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                described.host, described.port, described.count, described.index == 0, start_limit
            )
        store.set_timeout(limit)
        torch_distributed.init_process_group(
            engine, timeout=limit, store=store, rank=described.index, world_size=described.count
        )
    except (RuntimeError, ValueError) as error:
        raise FlowError(joining.cannot_join(described, start_limit.total_seconds(), error)) from error
    _joined = store
    atexit.register(_part, described.index)


def join_again(times: int) -> None:
    """Leave the process group and form another one, after its collectives were broken off.

    The store of the job stays; a prefix of its own keeps the new group apart from what was written for the old one.

    Args:
        times: how often this was done before, the same in all processes.
    """
    if _joined is None:
        return
    rank, size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    engine = torch_distributed.get_backend_config()
    limit = datetime.timedelta(seconds=joining.waiting_seconds())
    torch_distributed.destroy_process_group()
    store = torch_distributed.PrefixStore(f"again-{times}", _joined)  # pyright: ignore[reportPrivateImportUsage]
    torch_distributed.init_process_group(engine, timeout=limit, store=store, rank=rank, world_size=size)


def _use_network_of(address: str) -> None:
    """Let gloo listen on the interface that has an address; by itself it goes by the host's name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def put_text(key: str, text: str) -> None:
    """Write a text into the job's store."""
    _store().set(key, text)


def first_text(key: str, text: str) -> str:
    """Write a text into the job's store unless there is one; the one that is there then."""
    return _store().compare_set(key, "", text).decode()


def get_text(key: str, seconds: float) -> str:
    """Read a text from the job's store, waiting until it is there."""
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    try:
        # not `wait`: a rank that waits inside the store hears no signal
        while not _store().check([key]):
            if time.monotonic() > until:
                count, silent = torch_distributed.get_world_size(), int(key.rpartition("/")[2])
                raise joining.SilentProcess(silent, count, seconds, TimeoutError("nothing was written"))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return _store().get(key).decode()
    except RuntimeError as error:  # its connection does not come back
        raise joining.LostStore(key, error) from error


def delete_text(key: str) -> None:
    """Remove a text from the job's store."""
    _store().delete_key(key)


def _store() -> torch_distributed.distributed_c10d.Store:
    return torch_distributed.distributed_c10d._get_default_store()  # private: torch 2.13 has no public name for it


def _part(rank: int) -> None:
    """Leave the group at exit, together with the others where they arrive.

    A rank that closes its connections while another is still in its last collective makes that one fail, so all meet
    first: through the store, because a collective would be matched with one of the program's own. The wait is short:
    when this rank left the program early, the others must see its connections close. After a failure nothing is waited
    for.

    gloo's threads end with the process, which the launcher's child therefore ends by `os._exit`: one that gives back a
    tensor while the interpreter goes down aborts the process ("terminate called without an active exception", pytorch
    issue 190489).
    """
    if not torch_distributed.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    try:
        store = _store()
        count = store.add("keras_flow/parting", 1)
        until = time.monotonic() + _PARTING_SECONDS
        while count < torch_distributed.get_world_size() and time.monotonic() < until:
            time.sleep(0.02)
            # adding nothing reads the counter
            count = store.add("keras_flow/parting", 0)
        store.add("keras_flow/parted", 1)
        # rank 0 serves the store: it leaves last
        while rank == 0 and store.add("keras_flow/parted", 0) < count and time.monotonic() < until:
            time.sleep(0.02)
    except RuntimeError:
        pass  # rank 0, which serves the store, is gone: nothing is left to wait for
    torch_distributed.destroy_process_group()
