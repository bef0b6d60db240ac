"""Dry runs: variables have a shape and a layout but no value, and ranks are numbers without devices.

That is all `dist.explain` needs, so a model that fits on no machine here can be described.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from keras_flow.current.world import World
from keras_flow.scoped import setting

_world: ContextVar[World | None] = ContextVar("keras_flow_dry_run", default=None)


def on(world: World) -> AbstractContextManager[None]:
    """Inside, distributions need no devices and variables get no value; see `distributions.dry_run`."""
    return setting(_world, world)


def world(*args: object, **kwargs: object) -> World | None:
    """The ranks of the dry run, or None where ranks are real. As a condition of hooks it ignores its arguments."""
    return _world.get()


def is_dry_run() -> bool:
    """Whether variables get no value."""
    return _world.get() is not None
