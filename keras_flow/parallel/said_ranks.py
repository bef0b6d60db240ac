"""The ranks that `kf.scope.placement` says, while layers are made inside."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from keras_flow.scoped import setting

_said: ContextVar[tuple[int, ...] | None] = ContextVar("keras_flow_said_rank", default=None)


def current() -> tuple[int, ...] | None:
    """The ranks of the innermost scope, or None."""
    return _said.get()


def saying(ranks: tuple[int, ...]) -> AbstractContextManager[None]:
    """Inside, layers belong to ranks."""
    return setting(_said, ranks)
