"""Which layer, metric or optimizer is creating variables now. Hooks set it; `layout_for` reads it.

A rule gives layouts to the variables of layers only: the state of metrics and the counters of optimizers are broadcast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_flow.scoped import setting

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


def creating(kind: str, layer: keras.Layer | None = None) -> AbstractContextManager[None]:
    """Inside, variables that are created belong to this creator."""
    return setting(_current, Creator(kind, layer))


def creator() -> Creator | None:
    """The innermost creator, or None for a variable that the user creates by hand."""
    return _current.get()
