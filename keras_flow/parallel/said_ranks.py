"""The rank that `kf.scope.placement` says, while layers are made inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_said: ContextVar[int | None] = ContextVar("keras_flow_said_rank", default=None)


def current() -> int | None:
    """The rank of the innermost scope, or None."""
    return _said.get()


@contextmanager
def saying(rank: int) -> Iterator[None]:
    """Inside, layers belong to a rank."""
    token = _said.set(rank)
    try:
        yield
    finally:
        _said.reset(token)
