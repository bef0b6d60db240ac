"""Random states in the backups of `BackupAndRestore`: training that goes on draws what it would have drawn.

Keras's files of weights have no states of seed generators, so that dropout would begin again with its first masks.
They are written beside the weights, with the epoch that the backup is of: a process may end between the two files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow.backends import shared_files
from keras_flow.backends.active import backend
from keras_flow.backends.hooking import Hook
from keras_flow.current.models import remembered

if TYPE_CHECKING:
    import keras

_NAME = "keras_flow_random_states.json"


def model_of(callback: object, *args: object, **kwargs: object) -> keras.Model | None:
    """Condition of the hooks: the callback's model, where it belongs to a distribution."""
    model = getattr(callback, "_model", None)
    return model if model is not None and remembered(model) is not None and not shared_files.writing.get() else None


def save(model: keras.Model, original: Callable[..., object], callback: Any) -> None:
    """Hook on `BackupAndRestore._save_model`: the states too; of several processes the first one writes."""
    from keras.src.utils import file_utils  # as the callback: the folder may be one of a store

    # the logical value: equal on all ranks
    states = [np.asarray(state).tolist() for state in _states(model)]

    def write() -> None:
        original(callback)
        with file_utils.File(file_utils.join(callback.backup_dir, _NAME), "w") as file:
            file.write(json.dumps({"epoch": callback._current_epoch, "states": states}))

    if shared_files.distribution_of_processes(model) is None:
        write()
    else:
        backend().write_alone(write, model)


def restore(
    model: keras.Model, original: Callable[..., object], callback: Any, *args: object, **kwargs: object
) -> None:
    """Hook on `BackupAndRestore.on_train_begin`: take the states of the backup that was loaded."""
    from keras.src.utils import file_utils

    original(callback, *args, **kwargs)
    path = file_utils.join(callback.backup_dir, _NAME)
    if not file_utils.exists(path):
        return
    with file_utils.File(path, "r") as file:
        found = json.loads(file.read())
    states = _states(model)
    if found["epoch"] != model._initial_epoch or len(found["states"]) != len(states):
        return  # of another backup, or of a model with other layers: as Keras does it, from their first states
    for state, value in zip(states, found["states"], strict=True):
        state.assign(np.asarray(value, state.dtype))


def _states(model: keras.Model) -> list[keras.Variable]:
    """States of seed generators: what `variables` has beyond weights and metrics."""
    others = {id(variable) for variable in (*model.weights, *model.metrics_variables)}
    return [variable for variable in model.variables if id(variable) not in others]


def hooks() -> tuple[Hook, ...]:
    """The hooks on `BackupAndRestore`."""
    module = "keras.src.callbacks.backup_and_restore"
    return (
        Hook(
            module,
            "BackupAndRestore._save_model",
            save,
            "states of seed generators are in no file; folders and metadata are written by process 0 only",
            when=model_of,
        ),
        Hook(
            module,
            "BackupAndRestore.on_train_begin",
            restore,
            "training that goes on would draw the masks of its first steps again",
            when=model_of,
        ),
    )
