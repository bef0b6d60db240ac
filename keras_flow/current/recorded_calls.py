"""The recorder of layer calls, set by `dist.explain` to see what a layer without a graph calls inside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from keras_flow.scoped import setting

if TYPE_CHECKING:
    import keras


class Recorder(Protocol):
    """Records the calls of layers inside one layer, the root."""

    root: object

    def note(self, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object) -> object:
        """Call a layer inside the root with `original`, record the call, return its result."""
        ...


_recorder: ContextVar[Recorder | None] = ContextVar("keras_flow_recorded_calls", default=None)


def recorded_by(recorder: Recorder | None) -> AbstractContextManager[None]:
    """Inside, calls of layers go to this recorder; with None they are not recorded."""
    return setting(_recorder, recorder)


def recorder_of(layer: object, *args: object, **kwargs: object) -> Recorder | None:
    """Condition of the hook on `Layer.__call__`: the recorder of this call, or None; the root's own is not recorded."""
    recorder = _recorder.get()
    return recorder if recorder is not None and recorder.root is not layer else None
