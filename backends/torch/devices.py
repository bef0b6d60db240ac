"""Ranks on PyTorch: one process per rank, which a launcher starts and tells its rank by environment variables."""

from __future__ import annotations

import torch
import torch.distributed as torch_distributed

from keras_flow.backends.accelerators import own_accelerators
from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.backends.torch import ddp_of_keras
from keras_flow.backends.torch.processes import join
from keras_flow.current import processes
from keras_flow.current.keras_places import engine_core as keras_torch
from keras_flow.errors import FlowError

_world: World | None = None
_devices: tuple[torch.device, ...] = ()


def init(devices: int | None, type: str | None) -> World:
    """Join the process group of the job that the environment describes (`current/processes.py`).

    Raises:
        FlowError: the job has another number of ranks than asked for, or this host too few devices of the type.
    """
    # asked again without wishes: the answer stands
    if _world is not None and devices is None and type is None:
        return _world
    if _world is not None and _world.is_simulated and devices == _world.size:
        return _world
    described = processes.find()
    rank, size = described.index, described.count
    # the program may have joined by itself
    if torch_distributed.is_initialized():
        rank, size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    if devices is not None and devices != size:
        raise FlowError(_wrong_size(devices, size))
    chosen = _chosen_type(type)
    # before the group is made: NCCL binds a rank to the device that is current
    if chosen == "gpu" and described.count > 1:
        torch.cuda.set_device(own_accelerators(torch.cuda.device_count(), 1, described)[0])
    if size > 1 and not torch_distributed.is_initialized():
        join(described, chosen)
        ddp_of_keras.keep_away()
    return _begun(World(size=size, type=chosen, local_ranks=(rank,), process_index=rank, process_count=size))


def simulate(devices: int) -> World:
    """Play `devices` ranks in this process: a global tensor has all its shards here, and plans run on them.

    Raises:
        FlowError: this process is a rank of a job, or Keras computes on another device than the CPU.
    """
    if processes.find().count > 1 or torch_distributed.is_initialized():
        raise FlowError(
            f"kf.init({devices}, simulate=True) plays ranks in one process, and this one is a rank of a job already. "
            "Leave simulate out."
        )
    return _begun(World(size=devices, type=_chosen_type("cpu"), local_ranks=tuple(range(devices)), is_simulated=True))


def serve_with(servers: int) -> None:
    """Let rank 0 be this process, which has become the chief of parameter servers, and the servers the other ranks."""
    here = world()
    _begun(World(size=1 + servers, type=here.type, local_ranks=tuple(range(1 + servers))))


def world() -> World:
    """The ranks of `init`, or those that the launcher described when it was not called."""
    return _world or init(announced_devices(), None)


def rank_devices() -> tuple[torch.device, ...]:
    """The device of each rank, in the order of ranks. That of another process's rank is not known here."""
    if not _devices:
        world()
    return _devices


def _begun(here: World) -> World:
    global _world, _devices
    device = torch.device("cpu") if here.type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    _world, _devices = here, (device,) * here.size
    return here


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


def _wrong_size(devices: int, size: int) -> str:
    if size == 1:
        return (
            f"kf.init was asked for {devices} ranks, but on torch every rank is a process and this process is the only "
            f"one. Start the program with kf.run(main, devices={devices}), where main is the function that holds it, "
            f"or with `keras-flow launch --devices {devices} script.py`. In a notebook: "
            f"kf.notebook.start({devices}). To look at global tensors in one process: "
            f"kf.init({devices}, simulate=True)."
        )
    return (
        f"kf.init was asked for {devices} ranks, but this job was launched with {size}. "
        f"Leave devices out, ask for {size}, or launch the job with {devices}."
    )
