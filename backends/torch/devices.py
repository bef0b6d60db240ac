"""Ranks on PyTorch: one process per rank, which a launcher starts and tells its rank by environment variables."""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import time

import torch
import torch.distributed as torch_distributed
from keras.src.backend.torch import core as keras_torch  # the device that Keras computes on has no public name

from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.errors import FlowError

_world: World | None = None

#: seconds that a rank which is done waits for the others before it closes its connections
_PARTING_SECONDS = 3.0


def init(devices: int | None, type: str | None) -> World:
    """Join the process group of the job that a launcher described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    KERAS_FLOW_TIMEOUT (seconds, 1800 by default) is how long a collective waits for a rank.

    Raises:
        FlowError: the job has another number of ranks than asked for, or this host too few devices of the type.
    """
    global _world
    # asked again without wishes: the answer stands
    if _world is not None and devices is None and type is None:
        return _world
    if torch_distributed.is_initialized():
        rank, size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    else:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if devices is not None and devices != size:
        raise FlowError(_wrong_size(devices, size))
    chosen = _chosen_type(type)
    # before the group is made: NCCL binds a rank to the device that is current
    if chosen == "gpu":
        _take_gpu(size)
    if size > 1 and not torch_distributed.is_initialized():
        _join(rank, chosen)
    _world = World(size=size, type=chosen, local_ranks=(rank,), process_index=rank, process_count=size)
    return _world


def world() -> World:
    """The ranks of `init`, or those that the launcher described when it was not called."""
    return _world or init(announced_devices(), None)


def rank_devices() -> tuple[torch.device, ...]:
    """The device of each rank, in the order of ranks. That of another process's rank is not usable here."""
    here = world()
    if here.type == "cpu":
        return (torch.device("cpu"),) * here.size
    return tuple(torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(here.size))


def _join(rank: int, type: str) -> None:
    if "OMP_NUM_THREADS" not in os.environ:  # the ranks of one host share its cores
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    # what everything that waits is limited by
    seconds = float(os.environ.get("KERAS_FLOW_TIMEOUT") or 1800)
    engine = "gloo" if type == "cpu" else "cpu:gloo,cuda:nccl"
    torch_distributed.init_process_group(engine, timeout=datetime.timedelta(seconds=seconds))
    atexit.register(_part, rank)


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
        store = torch_distributed.distributed_c10d._get_default_store()
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


def _chosen_type(type: str | None) -> str:
    keras_device = str(keras_torch.get_device())
    # Keras has chosen its device when it was imported, and cannot change it now
    present = "gpu" if keras_device.startswith("cuda") else keras_device.split(":")[0]
    wanted = type or present
    if wanted == "gpu" and not torch.cuda.is_available():
        raise FlowError(
            "kf.init was asked for devices of type 'gpu', but torch has none. Use type='cpu', or leave type out (and "
            "KERAS_TORCH_DEVICE out of the environment)."
        )
    if wanted != present or wanted not in ("cpu", "gpu"):
        engine_name = "cuda" if wanted == "gpu" else "cpu"
        raise FlowError(
            f"kf.init was asked for devices of type {type!r}, but Keras computes on {keras_device!r}; on torch legal "
            f"types are 'cpu' and 'gpu'. Set the environment variable KERAS_TORCH_DEVICE={engine_name} before keras is "
            f"imported, or leave type out."
        )
    return wanted


def _take_gpu(size: int) -> None:
    local, available = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    # without a launcher's word all ranks are on this host
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if ranks_here > available:
        raise FlowError(
            f"the job has {ranks_here} ranks on this host, but torch has {available} device"
            f"{'s' if available > 1 else ''} of type 'gpu'; a rank needs a device of its own. Ask for at most "
            f"{available}, or compute on the CPU by KERAS_TORCH_DEVICE=cpu in the environment."
        )
    torch.cuda.set_device(local)


def _wrong_size(devices: int, size: int) -> str:
    if size == 1:
        return (
            f"kf.init was asked for {devices} ranks, but on torch every rank is a process and this process is the only "
            f"one. Start the program with kf.run(main, devices={devices}), where main is the function that holds it, "
            f"or with `keras-flow launch --devices {devices} script.py`."
        )
    return (
        f"kf.init was asked for {devices} ranks, but this job was launched with {size}. "
        f"Leave devices out, ask for {size}, or launch the job with {devices}."
    )
