"""Ranks on numpy: any number of them, all in this process."""

from __future__ import annotations

from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.errors import FlowError

_world: World | None = None


def init(devices: int | None, type: str | None) -> World:
    """Make `devices` ranks.

    Raises:
        FlowError: they are to be of another type than `"cpu"`.
    """
    global _world
    if type not in (None, "cpu"):
        raise FlowError(f"kf.init was asked for devices of type {type!r}; on numpy ranks are of type 'cpu'")
    if devices is not None or _world is None:
        count = devices or announced_devices() or 1
        _world = World(size=count, type="cpu", local_ranks=tuple(range(count)))
    return _world


def simulate(devices: int) -> World:
    """All ranks of numpy are such."""
    return init(devices, "cpu")


def world() -> World:
    """The ranks of `init`; one rank where it was not called."""
    return _world or init(None, None)
