"""The ranks that `kf.scope.placement` says, while layers are made inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_said: ContextVar[tuple[int, ...] | None] = ContextVar("keras_flow_said_rank", default=None)


def current() -> tuple[int, ...] | None:
    """The ranks of the innermost scope, or None."""
    return _said.get()


@contextmanager
def saying(ranks: tuple[int, ...]) -> Iterator[None]:
    """Inside, layers belong to ranks."""
    token = _said.set(ranks)
    try:
        yield
    finally:
        _said.reset(token)
