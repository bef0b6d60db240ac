"""Who is creating a variable right now: a layer, a metric, an optimizer. Set by hooks, read when a layout is chosen."""

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
    """Variables made inside belong to this creator."""
    token = _current.set(Creator(kind, layer))
    try:
        yield
    finally:
        _current.reset(token)


def creator() -> Creator | None:
    """The innermost creator, or None: a variable made by hand."""
    return _current.get()
