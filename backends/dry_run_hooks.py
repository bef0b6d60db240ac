"""Hooks of dry runs (`keras_flow.current.dry_run`), the same for every engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_flow.current import recorded_calls

if TYPE_CHECKING:
    import keras


def make_variable(
    original: Callable[..., None],
    variable: keras.Variable,
    initializer: object,
    shape: Sequence[int] | None = None,
    dtype: str | None = None,
    **kwargs: object,
) -> None:
    """Hook on `Variable.__init__`: as in a stateless scope the value comes later, that is never."""
    from keras.src import backend
    from keras.src.backend.common.stateless_scope import StatelessScope

    if not callable(initializer) and not isinstance(initializer, str):  # a number, or a value that exists already
        value: Any = backend.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype = tuple(value.shape), dtype or backend.standardize_dtype(value.dtype)
        initializer = functools.partial(_given, value)

    with StatelessScope():
        original(variable, initializer, shape, dtype, **kwargs)


def _given(value: object, *args: object, **kwargs: object) -> object:
    """An initializer: the value, whatever is asked for."""
    return value


def record(original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object) -> object:
    """Hook on `Layer.__call__`: explain notes the layers that one without a graph calls."""
    return recorded_calls.current().note(original, layer, *args, **kwargs)


def leave_out(original: Callable[..., object], *args: object, **kwargs: object) -> None:
    """A hook that leaves the call out."""
