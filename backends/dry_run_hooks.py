"""Hooks of dry runs (`keras_flow.current.dry_run`), the same for every engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_flow.backends.hooking import hook
from keras_flow.current import dry_run, recorded_calls

if TYPE_CHECKING:
    from keras_flow.current.recorded_calls import Recorder


@hook("keras:AnyVariable", "__init__", "explain of a dry run: variables have a shape and no value", when=dry_run.world)
def make_variable(
    _: object,
    original: Callable[..., None],
    variable: keras.Variable,
    initializer: object,
    shape: Sequence[int] | None = None,
    dtype: str | None = None,
    **kwargs: object,
) -> None:
    """Hook on `Variable.__init__`: the value is created later, as in a stateless scope; here, never."""
    if not callable(initializer) and not isinstance(initializer, str):  # a number, or a value that exists already
        value: Any = keras.ops.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype = tuple(value.shape), dtype or keras.backend.standardize_dtype(value.dtype)
        initializer = functools.partial(_given, value)

    with keras.StatelessScope():
        original(variable, initializer, shape, dtype, **kwargs)


def _given(value: object, *args: object, **kwargs: object) -> object:
    """An initializer: the value, whatever is asked for."""
    return value


@hook(
    "keras.Layer",
    "__call__",
    "explain sees which layers a layer without a graph calls",
    when=recorded_calls.recorder_of,
)
def record(
    recorder: Recorder, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object
) -> object:
    """Hook on `Layer.__call__`: explain notes the layers that one without a graph calls."""
    return recorder.note(original, layer, *args, **kwargs)
