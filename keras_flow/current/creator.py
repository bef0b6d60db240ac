"""Which layer, metric or optimizer is creating variables now. Hooks set it; `layout_for` reads it.

A rule gives layouts to the variables of layers only: the state of metrics and the counters of optimizers are broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Creator:
    """The object whose method creates variables.

    Attributes:
        kind: `"layer"`, `"metric"` or `"optimizer"`.
        layer: the layer, where it is one.
    """

    kind: str
    layer: keras.Layer | None = None


_current: ContextVar[Creator | None] = ContextVar("keras_flow_creator", default=None)


@contextmanager
def creating(kind: str, layer: keras.Layer | None = None) -> Iterator[None]:
    """Inside, variables that are created belong to this creator."""
    token = _current.set(Creator(kind, layer))
    try:
        yield
    finally:
        _current.reset(token)


def creator() -> Creator | None:
    """The innermost creator, or None for a variable that the user creates by hand."""
    return _current.get()
