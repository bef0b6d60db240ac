"""Models that are only described: variables have a shape and a layout and no value, ranks are numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from keras_flow.backends.interface import World

_world: ContextVar[World | None] = ContextVar("keras_flow_described_world", default=None)


@contextmanager
def describing(ranks: int, type: str | None = None) -> Iterator[None]:
    """Inside, distributions need no devices and variables get no value.

    Args:
        ranks: number of ranks that placements may name.
        type: their device type; None takes any.
    """
    from keras_flow.backends.active import backend
    from keras_flow.backends.hooking import install

    install(backend())
    token = _world.set(World(ranks, type or "cpu", tuple(range(ranks))))
    try:
        yield
    finally:
        _world.reset(token)


def described_world() -> World | None:
    """The ranks that are only described, or None where they are real."""
    return _world.get()


def is_describing(*args: object, **kwargs: object) -> bool:
    """A hook's condition: variables get no value."""
    return _world.get() is not None
