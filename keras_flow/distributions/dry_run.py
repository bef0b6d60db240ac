"""Dry runs: distributions without devices, for `dist.explain` of a model that need not fit anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from keras_flow.backends.active import backend
from keras_flow.backends.installing import install
from keras_flow.current import dry_run as current
from keras_flow.current.world import World


@contextmanager
def dry_run(ranks: int, type: str | None = None) -> Iterator[None]:
    """Inside, distributions need no devices and variables get no value.

    Args:
        ranks: number of ranks that placements may name.
        type: their device type; None takes any.
    """
    install(backend())
    with current.on(World(ranks, type or "cpu", tuple(range(ranks)))):
        yield
