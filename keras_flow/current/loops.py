"""The calls of Keras's entry points that run now: `fit`, the `evaluate` within it, a callback's `train_on_batch`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_flow.scoped import setting

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True, eq=False)
class Loop:
    """A call of `fit` or of another entry point.

    Attributes:
        model: the model whose method was called.
        name: the method.
        given: the arguments of the call, by name; without the defaults.
    """

    model: keras.Model
    name: str
    given: Mapping[str, object]


_running: ContextVar[tuple[Loop, ...]] = ContextVar("keras_flow_loops", default=())


def running() -> tuple[Loop, ...]:
    """The calls that run, outer first.

    Example:
        >>> running()
        ()
    """
    return _running.get()


def within(loop: Loop) -> AbstractContextManager[None]:
    """Inside, the call runs."""
    return setting(_running, (*_running.get(), loop))
