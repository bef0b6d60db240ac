"""Ranks on TensorFlow: a process drives the devices of its host, or its part of them; a CPU gives any number."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

# Unset (TensorFlow's default) or 1, DTensor's pass that combines all-reduces gives wrong gradients in `fit`, without an
# error (seen with TensorFlow 2.21). It is read when the first DTensor function is compiled.
os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = "0"
# With its all-to-all, which exchanges parts in the order of devices, a tensor that goes from split rows to split
# columns is wrong on a mesh whose ranks do not ascend along the axis. It is read when the first function needs it.
os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"

import keras
import tensorflow as tf
from tensorflow.python.eager import context  # pyright: ignore[reportMissingImports]

from keras_flow.backends.accelerators import own_accelerators
from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.backends.tensorflow.processes import JOB, join, joined
from keras_flow.current import first_use, joining, processes
from keras_flow.current.distribution import active
from keras_flow.errors import FlowError
from keras_flow.units import counted

_world: World | None = None
#: threads of TensorFlow's executor: a Python function in a step (`host_calls`) holds one while it waits for what it
#: runs on another. TensorFlow takes one for each core of the process, and `mpirun` and `srun` may give it one core.
_LEAST_THREADS = 2
#: names of the ranks' devices, where this process is the chief of parameter servers
_devices: tuple[str, ...] = ()


def init(devices: int | None, type: str | None) -> World:
    """Make virtual CPU devices where TensorFlow has not started yet and runs on a CPU, otherwise take the real ones.

    Of several processes each makes its part.

    Raises:
        FlowError: TensorFlow has fewer devices than asked for, none of the type, or has started without the other
            processes.
    """
    global _world
    if _world is not None and devices is None and type is None:
        return _world
    described = processes.find()
    started = _started()
    if started and described.count > 1 and joined().count == 1:
        raise FlowError(joining.too_late(described, "TensorFlow", "creating a tensor, a Keras layer or model"))
    own = joining.own_share(devices, described)
    chosen = _chosen_type(type)
    threads = tf.config.threading
    if not started and not threads.get_inter_op_parallelism_threads() and _cores() < _LEAST_THREADS:
        threads.set_inter_op_parallelism_threads(_LEAST_THREADS)
    if chosen == "cpu" and not started:
        if type == "cpu" and tf.config.list_physical_devices("GPU"):
            tf.config.set_visible_devices([], "GPU")  # otherwise Keras computes on the GPU
        if own is not None:
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * own)
    if chosen == "gpu" and not started:
        gpus = tf.config.get_visible_devices("GPU")
        if len(gpus) == len(tf.config.list_physical_devices("GPU")):  # else the program has chosen
            mine = own_accelerators(len(gpus), own, described)
            tf.config.set_visible_devices([gpus[number] for number in mine], "GPU")
    available = _count(chosen)
    if own is not None and available < own:
        raise FlowError(_too_few(own, available, chosen))
    if not started:
        join(described, chosen)
    here, share = joined(), available if own is None else own
    _world = World(
        size=share * here.count,
        type=chosen,
        local_ranks=tuple(range(share * here.index, share * (here.index + 1))),
        process_index=here.index,
        process_count=here.count,
    )
    return _world


def simulate(devices: int) -> World:
    """Virtual CPU devices are such ranks."""
    return init(devices, "cpu")


def world() -> World:
    """The ranks of `init`, or all devices of TensorFlow's default type when it was not called.

    A job started by `keras-flow launch` has the number of ranks given there.
    """
    return _world or init(announced_devices(), None)


def rank_devices() -> tuple[str, ...]:
    """The device of each rank, in the order of ranks. That of another process's rank is not usable here."""
    here = world()
    return _devices or _names(here)


def serve_with(chief: str, servers: Sequence[str]) -> None:
    """Let rank 0 be this process, which has become the chief of parameter servers, and the servers the other ranks."""
    global _world, _devices
    _devices = (chief, *servers)
    _world = World(size=len(_devices), type="cpu", local_ranks=tuple(range(len(_devices))))


@functools.cache
def _names(here: World) -> tuple[str, ...]:
    share = len(here.local_ranks)
    return tuple(_name(rank // share, here.type, rank % share) for rank in range(here.size))


def host_device() -> str:
    """The CPU of this process. Of several, plain "CPU:0" is that of the first."""
    return _devices[0] if _devices else _name(joined().index, "cpu", 0)


def _name(process: int, type: str, number: int) -> str:
    job = JOB if joined().count > 1 else "localhost"
    return f"/job:{job}/replica:0/task:{process}/device:{type.upper()}:{number}"


def _started() -> bool:
    # private: TensorFlow has no public name for this (checked with TensorFlow 2.21)
    return bool(context.context()._initialized)  # pyright: ignore[reportOptionalMemberAccess]


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chosen_type(type: str | None) -> str:
    present = "gpu" if tf.config.get_visible_devices("GPU") else "cpu"
    wanted = type or present
    if not tf.config.get_visible_devices(wanted.upper()):
        raise FlowError(
            f"kf.init was asked for devices of type {type!r}, but TensorFlow has none: its devices are of type "
            f"{present!r}. Use type={present!r}, or leave type out."
        )
    return wanted


def _count(type: str) -> int:
    """Logical devices of `type`. Before TensorFlow has started they are counted without starting it."""
    if _started():
        # of the cluster's devices only those of this process
        own = f"task:{joined().index}/" if joined().count > 1 else ""
        return len([device for device in tf.config.list_logical_devices(type.upper()) if own in device.name])
    count = 0
    for device in tf.config.get_visible_devices(type.upper()):
        virtual = tf.config.get_logical_device_configuration(device)
        count += len(virtual) if virtual else 1
    return count


def _too_few(devices: int, available: int, type: str) -> str:
    have = f"{counted(available, 'device')} of type {type!r}"
    # accelerators are what the machine has; CPU devices are virtual, and can be as many as asked for at first
    if type != "cpu":
        return (
            f"kf.init was asked for {devices} ranks, but TensorFlow has {have}; a rank needs a device of its own. "
            f"Ask for at most {available}, or for virtual CPU devices with kf.init({devices}, type='cpu')."
        )
    return (
        f"kf.init was asked for {devices} ranks, but TensorFlow is already initialized with {have}, and cannot make "
        f"more afterwards. Creating a tensor, a Keras layer or model, or calling tf.config.list_logical_devices() "
        f"initialises it: call kf.init({devices}) (or kf.run(main, devices={devices})) before the first of these."
        f"{first_use.in_words(first_use.first_uses('tensorflow'))}"
    )


def _leave() -> None:
    """In a forked process: a layout over ranks would wait for their threads, which the parent alone has."""
    if active() is not None:
        keras.distribution.set_distribution(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave)
