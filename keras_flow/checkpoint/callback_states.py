"""States of a `fit`'s other callbacks, for its checkpoints: numbers and texts, and weights that they keep.

get_state(), set_state(state)     a callback that has both says it itself
best, wait, stopped_epoch         attributes that are numbers or texts, and have changed since it began
best_weights                      attributes that are lists of arrays: tensors of the checkpoint
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_flow.checkpoint import names
from keras_flow.checkpoint.as_json import PLAIN, decoded, encoded
from keras_flow.checkpoint.manifest import SAFETENSORS
from keras_flow.checkpoint.reader import Reader
from keras_flow.errors import warn

#: what TensorBoard notes of a profiler, which runs in this process
_OF_PROCESS = ("_is_tracing", "_should_trace", "_profiler_started")


def plain(callback: object) -> dict[str, Any]:
    """The attributes of a callback that are numbers and texts, as JSON has them; private ones of Keras's callbacks."""
    found = {}
    is_of_keras = any(
        kind.__module__.partition(".")[0] == "keras" and issubclass(kind, keras.callbacks.Callback)
        for kind in type(callback).__mro__
        if kind is not keras.callbacks.Callback
    )
    for name, value in vars(callback).items():
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, PLAIN) and (not name.startswith("_") or (is_of_keras and name not in _OF_PROCESS)):
            found[name] = value
    return found


def numbers(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return the key of each callback in a checkpoint: its class, and which of this class it is.

    So a callback that process 0 alone has, or that comes later, changes no other's key.

    Example:
        >>> numbers(["EarlyStopping", "CSVLogger", "EarlyStopping"])
        [('EarlyStopping', 0), ('CSVLogger', 0), ('EarlyStopping', 1)]
    """
    return [(name, list(names[:place]).count(name)) for place, name in enumerate(names)]


def numbered(callbacks: Sequence[keras.callbacks.Callback]) -> dict[tuple[str, int], keras.callbacks.Callback]:
    """Return callbacks by their keys."""
    return dict(zip(numbers([type(each).__name__ for each in callbacks]), callbacks, strict=True))


def _says_itself(callback: object) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def state_of(callback: Any, begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a callback that have changed since they were `begun`.

    Keras's own settings are left out: EarlyStopping changes the sign of its `min_delta` in the first epoch, and so it
    does again in the `fit` that resumes.
    """
    if _says_itself(callback):
        return encoded(callback.get_state())
    settings = {
        name
        for kind in type(callback).__mro__
        if kind.__module__.partition(".")[0] == "keras"
        for name in inspect.signature(kind).parameters
    }
    return {
        name: value
        for name, value in plain(callback).items()
        if name not in settings and (name not in begun or begun[name] != value)
    }


def set_state(callback: Any, state: Mapping[str, Any]) -> None:
    """Restore what a callback had counted."""
    if _says_itself(callback):
        callback.set_state(decoded(state))
    else:
        vars(callback).update(state)


def arrays_of(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, np.ndarray]:
    """Name in the checkpoint -> an array that a callback keeps, as `get_weights` gives them."""
    found: dict[str, np.ndarray] = {}
    for (kind, number), callback in numbered(callbacks).items():
        for attribute, value in vars(callback).items():
            if not isinstance(value, list) or not value or not all(isinstance(each, np.ndarray) for each in value):
                continue
            name = f"{kind}/{attribute}"
            if other := {array.dtype.name for array in value} - SAFETENSORS.keys():
                _say_left_out(name, min(other))
                continue
            found |= {f"{names.CALLBACKS}{number}/{name}/{place}": array for place, array in enumerate(value)}
    return found


@functools.cache
def _say_left_out(name: str, dtype: str) -> None:
    """Say once that arrays of a callback are not saved."""
    warn(f"checkpoints leave out {name}, which a callback keeps: safetensors has no arrays of {dtype}")


def set_arrays(callbacks: Mapping[tuple[str, int], object], reader: Reader) -> None:
    """Restore the arrays that callbacks kept; callbacks by their keys."""
    for name in reader.manifest.tensors:  # in the order in which they were saved
        if name.startswith(names.CALLBACKS):
            number, kind, attribute, place = name.removeprefix(names.CALLBACKS).split("/")
            if (kind, int(number)) not in callbacks:
                continue
            kept = vars(callbacks[kind, int(number)])
            kept[attribute] = [*(kept[attribute] if int(place) else []), reader.read(name)]
