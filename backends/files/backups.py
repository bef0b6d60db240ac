"""Random states in the backups of `BackupAndRestore`: training that resumes draws what it would have drawn.

Keras's weights files have no states of seed generators, so dropout would begin again with its first masks. The states
are written to a file beside the weights. A process may be killed when it has written one of the two files and not yet
the other. So the file has the states of this backup and of the one before, each with the number of updates; the number
in the weights file says which of them to take.

Example: killed in the backup after update 200. The weights are those after update 100, the file of states has 100 and
200: the states of 100 are restored.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow import atomic
from keras_flow.backends.active import backend
from keras_flow.backends.files import shared_files
from keras_flow.backends.object_hooks import replaces
from keras_flow.current.keras_places import file_utils
from keras_flow.current.models import remembered

if TYPE_CHECKING:
    import keras

_NAME = "keras_flow_random_states.json"


def model_of(callback: object, *args: object, **kwargs: object) -> keras.Model | None:
    """Condition of the hooks: the callback's model, where it belongs to a distribution."""
    model = getattr(callback, "_model", None)
    return model if model is not None and remembered(model) is not None and not shared_files.writing.get() else None


@replaces("keras.callbacks.BackupAndRestore", "_save_model", when=model_of)
def save(model: keras.Model, original: Callable[..., object], callback: Any) -> None:
    """Hook on `BackupAndRestore._save_model`: the states too; of several processes the first one writes."""
    model = callback.model  # on JAX a model that trains gets its values back when it is asked for
    # the logical value: equal on all ranks
    states = [np.asarray(state).tolist() for state in _states(model)]
    backup = {"iterations": _iterations(model), "epoch": callback._current_epoch, "states": states}

    def write() -> None:
        path = file_utils.join(callback.backup_dir, _NAME)
        if not file_utils.exists(callback.backup_dir):
            file_utils.makedirs(callback.backup_dir)
        # of the last backup too: the file of weights, which is renamed after this one, decides which of them holds
        last = [each for each in _read(path) if each["iterations"] != backup["iterations"]][-1:]
        _write(path, json.dumps([*last, backup]))
        _original_whole(original, callback)

    if shared_files.distribution_of_processes(model) is None:
        write()
    else:
        backend().write_alone(write, model, "BackupAndRestore")


def _original_whole(original: Callable[..., object], callback: Any) -> None:
    """Let Keras write weights, which it does by our hook, and metadata, which it does in place."""
    path = callback._training_metadata_path
    if not os.path.isdir(callback.backup_dir):  # a store, which has no half files
        original(callback)
        return
    with atomic.beside(path) as new:
        if os.path.exists(path):
            shutil.copy(path, new)  # Keras may copy it for its second backup
        callback._training_metadata_path = str(new)
        try:
            original(callback)
        finally:
            callback._training_metadata_path = path


@replaces("keras.callbacks.BackupAndRestore", "on_train_begin", when=model_of)
def restore(
    model: keras.Model, original: Callable[..., object], callback: Any, *args: object, **kwargs: object
) -> None:
    """Hook on `BackupAndRestore.on_train_begin`: take the states of the backup that was loaded."""
    _say_what_is_exact()
    original(callback, *args, **kwargs)
    here = _iterations(model)
    states = _states(model)
    for found in _read(file_utils.join(callback.backup_dir, _NAME)):
        if found["iterations"] != here or len(found["states"]) != len(states):
            continue  # of another backup, or of a model with other layers: as Keras does it
        # Keras's own file of the epoch may be that of the backup before: a process ended between two files
        if here is not None and file_utils.exists(callback._weights_path):
            model._initial_epoch = found["epoch"]
        if found["epoch"] == model._initial_epoch:
            for state, value in zip(states, found["states"], strict=True):
                state.assign(np.asarray(value, state.dtype))


@functools.cache
def _say_what_is_exact() -> None:
    """Say once what a `fit` that goes on from a backup does not have."""
    if backend().world().process_index == 0:
        print(
            "keras_flow: BackupAndRestore goes on at the begin of an epoch: steps after it are made twice, and history "
            "and what callbacks counted are lost. kf.callbacks.Checkpoint goes on after the last batch that it saved, "
            "to the last bit",
            file=sys.stderr,
            flush=True,
        )


def _iterations(model: keras.Model) -> int | None:
    """How many steps the weights have had, which is also in their file."""
    if model.optimizer is None:
        return None
    # those that accumulate gradients have `iterations` for whole updates only, and count steps in this one
    return int(np.asarray(getattr(model.optimizer, "inner_optimizer", model.optimizer)._iterations))


def _read(path: str) -> list[dict[str, Any]]:
    """The last two backups of a file; none where it is not there, or of an older form."""
    if not file_utils.exists(path):
        return []
    with file_utils.File(path, "r") as file:
        found = json.loads(file.read())
    return found if isinstance(found, list) else []


def _write(path: str, text: str) -> None:
    if os.path.isdir(os.path.dirname(path)):
        atomic.write_text(path, text)
    else:
        with file_utils.File(path, "w") as file:
            file.write(text)


def _states(model: keras.Model) -> list[keras.Variable]:
    """States of seed generators: what `variables` has beyond weights and metrics."""
    others = {id(variable) for variable in (*model.weights, *model.metrics_variables)}
    return [variable for variable in model.variables if id(variable) not in others]
