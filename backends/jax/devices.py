"""Ranks on JAX: a process drives the devices of its host, or its part of them; a CPU gives any number of them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pkgutil
import re

import jax

from keras_flow.backends.accelerators import own_accelerators
from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.backends.jax.processes import collectives_on, join
from keras_flow.current import first_use, joining, processes
from keras_flow.errors import FlowError, is_of_user
from keras_flow.units import counted

_world: World | None = None

#: the device of each rank of that world: asked for before every redistribution
_devices: tuple[jax.Device, ...] = ()  # pyright: ignore[reportInvalidTypeForm]

#: threads of XLA's CPU pool as this process had them when the backend was first seen; None: not seen yet
_pool_threads: int | None = None


def init(devices: int | None, type: str | None) -> World:
    """Make `devices` virtual CPU devices where JAX has not started yet and runs on a CPU, else take what is there.

    Of several processes each makes its part.

    Raises:
        FlowError: JAX has fewer devices than asked for, none of the type, or has started without the other processes.
    """
    global _world, _devices
    if _world is not None and devices is None and type is None:
        return _world
    described = processes.find()
    started = _started()
    if started and described.count > 1 and jax.process_count() == 1:
        raise FlowError(joining.too_late(described, "JAX", "creating an array, a Keras layer or model"))
    own = joining.own_share(devices, described)
    if not started and type in (None, "cpu"):
        if own is not None:
            jax.config.update("jax_num_cpu_devices", max(own, _announced_cpu_devices()))
        if type == "cpu" and not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_platforms", "cpu")
    if not started:
        join(described, None if type == "cpu" else _own_gpus(own, described))
    with collectives_on(joining.own_address(described) if described.count > 1 else None):
        _start(own)
    try:
        available = jax.devices(type)
    except RuntimeError as error:
        present = jax.default_backend()
        raise FlowError(
            f"kf.init was asked for devices of type {type!r}, but JAX has none: its devices are of type {present!r}. "
            f"Use type={present!r}, or leave type out."
        ) from error
    if devices is not None and len(available) < devices:
        raise FlowError(_too_few(devices, available))
    taken = _of_each_process(available, own)
    _world, _devices = _as_world(taken), tuple(taken)
    return _world


def simulate(devices: int) -> World:
    """Virtual CPU devices are such ranks."""
    return init(devices, "cpu")


def world() -> World:
    """The ranks of `init`, or all devices of JAX's default type when it was not called.

    A job started by `keras-flow launch` has the number of ranks given there.
    """
    return _world or init(announced_devices(), None)


def rank_devices(type: str | None = None) -> tuple[jax.Device, ...]:  # pyright: ignore[reportInvalidTypeForm]
    """The device of each rank, in the order of ranks; all of another type, which `init` did not take."""
    if not _devices:
        world()
    if type in (None, world().type, _devices[0].platform):
        return _devices
    return tuple(jax.devices(type))


def must_await_steps() -> bool:
    """Whether each step must be awaited before the next one is sent.

    Every virtual device needs a thread of its own inside a collective. XLA's pool has NPROC threads (else one per
    core); with several steps in flight, threads of a later step can occupy the pool, no collective completes, and XLA
    aborts the process. `init` makes the pool large enough, which it cannot where the backend exists already.
    """
    count = len(jax.devices())
    if count == 1 or jax.default_backend() != "cpu":
        return False
    return (_pool_threads or _threads()) < 2 * count


def _of_each_process(available: list[jax.Device], share: int | None) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """So many devices of each process, which may have more; None: all."""
    numbers: dict[int, int] = {}
    taken = []
    for device in available:
        numbers[device.process_index] = numbers.get(device.process_index, 0) + 1
        if share is None or numbers[device.process_index] <= share:
            taken.append(device)
    return taken


def _started() -> bool:
    from jax._src import xla_bridge  # private: JAX has no public name for this (checked with jax 0.10)

    return xla_bridge.backends_are_initialized()


def _start(devices: int | None) -> None:
    """Create JAX's backend with a thread pool that is large enough (see `must_await_steps`)."""
    global _pool_threads
    if not _started():
        count = max(devices or 1, _announced_cpu_devices())
        os.environ["NPROC"] = str(max(_threads(), 2 * count))
        jax.devices()
    if _pool_threads is None:
        _pool_threads = _threads()


def _threads() -> int:
    named = os.environ.get("NPROC", "")
    return int(named) if named.isdigit() else os.cpu_count() or 1


def _own_gpus(share: int | None, described: processes.Processes) -> list[int] | None:
    """The numbers of the NVIDIA GPUs that this process takes; None where JAX has none, or this process all of them.

    JAX tells how many there are only once it has taken all of them, so CUDA's driver is asked.
    """
    platforms = jax.config.jax_platforms or "cuda"  # pyright: ignore[reportAttributeAccessIssue]
    plugins = getattr(importlib.util.find_spec("jax_plugins"), "submodule_search_locations", None) or ()
    has_plugin = any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(plugins))
    if described.count == 1 or not has_plugin or "cuda" not in platforms.replace("gpu", "cuda"):
        return None
    # the user has chosen by JAX's own means
    if any(os.environ.get(name) for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES")):
        return None
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return list(own_accelerators(count.value, share, described))


def _announced_cpu_devices() -> int:
    """The number of CPU devices that JAX's configuration or XLA_FLAGS ask for."""
    configured = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if configured > 0:
        return configured
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flag[-1]) if flag else 1


def _as_world(devices: list[jax.Device]) -> World:  # pyright: ignore[reportInvalidTypeForm]
    mine = tuple(rank for rank, device in enumerate(devices) if device.process_index == jax.process_index())
    return World(
        size=len(devices),
        type="gpu" if devices[0].platform == "cuda" else devices[0].platform,
        local_ranks=mine,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        processes=tuple(device.process_index for device in devices),
    )


def _too_few(devices: int, available: list[jax.Device]) -> str:  # pyright: ignore[reportInvalidTypeForm]
    have = f"{counted(len(available), 'device')} of type {available[0].platform!r}"
    if available[0].platform != "cpu":
        return (
            f"kf.init was asked for {devices} ranks, but JAX has {have}; a rank needs a device of its own. "
            f"Ask for at most {len(available)}, or for virtual CPU devices with kf.init({devices}, type='cpu')."
        )
    return (
        f"kf.init was asked for {devices} ranks, but JAX is already initialized with {have}, and cannot make more "
        f"afterwards. Creating an array, a Keras layer or model, or calling jax.devices() initialises it: call "
        f"kf.init({devices}) (or kf.run(main, devices={devices})) before the first of these."
        f"{first_use.in_words(_made_first() or first_use.first_uses('jax'))}"
    )


def _made_first() -> dict[str, str]:
    """The user's line that made the oldest program or array that JAX still has."""
    client = jax.devices()[0].client  # its lists are private, newest first (looked up in jax 0.8 to 0.10)
    for made in reversed([*getattr(client, "live_arrays", list)(), *getattr(client, "live_executables", list)()]):
        for frame in getattr(made.traceback, "frames", ()):
            if is_of_user(frame.file_name):
                return first_use.line_of(frame.file_name, frame.line_num)
    return {}
