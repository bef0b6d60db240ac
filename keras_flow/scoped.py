"""Context variables that have a value within a `with` statement, and their old one after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
