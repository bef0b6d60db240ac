"""Who is told of every layer that is called: `dist.explain`, of layers with others inside and no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import keras


class Recorder(Protocol):
    """Notes the calls inside one layer, its root."""

    root: object

    def note(self, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object) -> object:
        """Call a layer inside the root and note it; the call's result."""
        ...


_recorder: ContextVar[Recorder | None] = ContextVar("keras_flow_recorded_calls", default=None)


@contextmanager
def told(recorder: Recorder | None) -> Iterator[None]:
    """Inside, this recorder is told; None for nobody."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def recorder_of(layer: object, *args: object, **kwargs: object) -> Recorder | None:
    """Condition of the hook on `Layer.__call__`: who is told of this call, that of a layer inside the root."""
    recorder = _recorder.get()
    return recorder if recorder is not None and recorder.root is not layer else None
