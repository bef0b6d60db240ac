"""Files of a job of several processes: all call, process 0 writes, and its error is raised in all of them.

A file is then written as for one device: every process saves under one path, in callbacks too, and none waits for ever.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow import atomic
from keras_flow.backends.active import backend
from keras_flow.backends.files import whole_files
from keras_flow.backends.hooking import hook
from keras_flow.backends.object_hooks import replaces
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.current import keras_places
from keras_flow.current.distribution import active, holding
from keras_flow.current.joining import WRITER_FAILED
from keras_flow.current.models import all_variables, own_variables, remembered
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution

#: what processes do that write a file together, in messages
WRITES = "writing a file of the model"

#: this process is writing alone: nothing inside may be a collective
writing: ContextVar[bool] = ContextVar("keras_flow_writing", default=False)

#: id of a variable -> its logical value, while this process is writing alone
_copies: ContextVar[dict[int, np.ndarray] | None] = ContextVar("keras_flow_copies", default=None)


def distribution_of_processes(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on functions that write a model: its distribution, where that is of several processes."""
    several = backend().world().process_count > 1
    return remembered(model) if several and not writing.get() else None


def shared_model(callback: object, *args: object, **kwargs: object) -> keras.Model | None:
    """Condition of hooks on callbacks: their model, where that belongs to a distribution of several processes."""
    model = getattr(callback, "_model", None)
    return model if model is not None and distribution_of_processes(model) is not None else None


def distribution_of(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hooks on `save_model` and `save_weights`: the model's distribution, or that of the scope.

    A model without variables, or one that is not built, remembers none.
    """
    return remembered(model) or active()


def distribution_or_loop(model: keras.Model, *args: object, **kwargs: object) -> Distribution | bool | None:
    """Condition of the hook: `distribution_of`, or else whether a loop of one's own writes what must be whole.

    Its processes know nothing of each other's calls, and a callback of `kf.on_preemption` may be killed.
    """
    in_loop = not writing.get() and (atomic.is_noting() or backend().world().process_count > 1)
    return distribution_of(model) or in_loop or None


@hook(
    "keras:saving",
    ("save_model", "save_weights"),
    "all processes call it with one path: process 0 writes, and renames what is whole",
    when=distribution_or_loop,
)
def save(
    found: Distribution | bool,
    original: Callable[..., object],
    model: keras.Model,
    filepath: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Hook on `save_model` and `save_weights`: process 0 writes, beside the name, and renames.

    Without it all processes open one file, and those that fail leave the others waiting; and whoever is killed while it
    writes leaves half a file where a whole one was. Without a distribution one process may write alone, or each another
    file: each that calls writes a whole one.
    """

    def write() -> None:
        whole_files.save(original, model, filepath, *args, **kwargs)

    if found is True:
        write()
    else:
        once(write, model, original.__name__)


def once(action: Callable[[], object], model: keras.Model | None, name: str) -> None:
    """Call `action` once in the job, which writes a file of a model: here if this process writes alone, else as all do.

    Args:
        action: writes the file.
        model: the model whose variables it may read; None where it reads none.
        name: what writes, the same in all processes.
    """
    if writing.get() or backend().world().process_count == 1:
        action()
    else:
        backend().write_alone(action, model, name)


def without_hosts_of_orbax(callback: Any, *args: object, **kwargs: object) -> keras.Model | None:
    """Condition of the hooks on `OrbaxCheckpoint`: the callback's model, where Orbax does not know of the processes.

    With JAX's own coordination service it does, and each process writes its part.
    """
    return None if writing.get() or callback.is_multihost_enabled() else shared_model(callback)


@replaces("keras.callbacks.BackupAndRestore", "on_train_end", when=shared_model)
@replaces("keras.callbacks.CSVLogger", ("on_train_begin", "on_epoch_end", "on_train_end"), when=shared_model)
@replaces("keras.callbacks.OrbaxCheckpoint", ("wait_until_finished", "on_train_end"), when=without_hosts_of_orbax)
def callback_writes(
    _: object, original: Callable[..., object], callback: object, *args: object, **kwargs: object
) -> None:
    """Hook on `BackupAndRestore.on_train_end` and methods of `CSVLogger`: process 0 does it.

    They write or remove files without weights.
    """
    name = f"{type(callback).__name__}.{original.__name__}"
    backend().write_alone(lambda: original(callback, *args, **kwargs), None, name)


def among_processes(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `ModelCheckpoint`: the active distribution, where it is of several processes."""
    distribution = active()  # first: without one no engine is asked
    return distribution if distribution is not None and backend().world().process_count > 1 else None


@replaces("keras.callbacks.ModelCheckpoint", "_get_file_path", when=among_processes)
def with_a_folder(_: object, original: Callable[..., str], callback: object, *args: object) -> str:
    """Hook on `ModelCheckpoint._get_file_path`: the folder is there. Each process made it, and the second failed."""
    path = original(callback, *args)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    return path


@hook(
    "keras.saving.KerasFileEditor",
    "save",
    "all processes call it with one path: process 0 writes, and renames what is whole",
)
def save_edited(
    _: object, original: Callable[..., object], editor: keras.saving.KerasFileEditor, filepath: Any
) -> None:
    """Hook on `KerasFileEditor.save`: as `save`, of a file that every process has read."""
    once(lambda: whole_files.save(original, editor, filepath), None, "KerasFileEditor.save")


@replaces("keras.callbacks.OrbaxCheckpoint", "_save_checkpoint", when=without_hosts_of_orbax)
def orbax_saves(
    model: keras.Model, original: Callable[..., object], callback: Any, step: int, logs: Any = None
) -> None:
    """Hook on `OrbaxCheckpoint._save_checkpoint`: process 0 writes, from the logical values.

    Orbax knows of JAX's processes only: the others would write into one folder at once, and fail.
    """
    backend().write_alone(lambda: original(callback, step, logs), model, "OrbaxCheckpoint")


@replaces("keras.callbacks.TensorBoard", "set_model")
def throw_away_logs(_: object, original: Callable[..., object], callback: object, model: keras.Model) -> object:
    """Hook on `TensorBoard.set_model`: all processes log, since that reads weights; process 0 alone to the folder."""
    is_shared = distribution_of_processes(model) is not None
    if is_shared and backend().world().process_index != 0 and not getattr(callback, "_keras_flow_nowhere", False):
        callback.log_dir = tempfile.mkdtemp(prefix="keras_flow_")  # type: ignore[attr-defined]
        callback._keras_flow_nowhere = True  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, callback.log_dir, ignore_errors=True)  # type: ignore[attr-defined]
    return original(callback, model)


def saved_variables(model: keras.Model) -> Iterator[keras.Variable]:
    """The variables that a file of the model may hold: its own, those of its metrics and of its optimizers."""
    return all_variables(model, optimizers=True)


def copy_of(variable: object) -> np.ndarray | None:
    """The logical value of a variable, where this process is writing alone and the variable is split."""
    copies = _copies.get()
    return None if copies is None else copies.get(id(variable))


@contextmanager
def plain(variables: Iterable[keras.Variable], layers: Iterable[keras.Layer], made: dict[int, Any]) -> Iterator[None]:
    """Inside, variables have plain logical values on one device, and no distribution holds.

    Args:
        variables: some.
        layers: those that have them.
        made: id of a variable -> the plain value of an earlier call, which a traced function may hold; it is added to.
    """
    given = [variable for variable in variables if variable._value is not None]
    # while all are on the ranks
    values = [np.asarray(variable) if (copy := copy_of(variable)) is None else copy for variable in given]
    kept = [(variable._value, getattr(variable, "_layout", None)) for variable in given]
    with holding(None):
        try:
            for variable, value in zip(given, values, strict=True):
                variable._layout = None
                variable._value = backend().plain_value(variable, value, made.get(id(variable)))
                made[id(variable)] = variable._value
            for layer in layers:
                backend().track(layer)
            yield
        finally:
            for variable, (value, layout) in zip(given, kept, strict=True):
                variable._value, variable._layout = value, layout
            for layer in layers:
                backend().track(layer)


def computing_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers that write values that they compute: these have to find their weights whole."""

    def computes(layer: Any) -> bool:
        # a user's method may compute with the weights
        own = not keras_places.is_of_keras(type(layer).save_own_variables)
        return own or bool(getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None))

    return [layer for layer in model._flatten_layers() if computes(layer)]


def write_alone(
    action: Callable[[], object],
    model: keras.Model | None,
    name: str,
    reads: Callable[[keras.Model], Iterable[keras.Variable]] = saved_variables,
) -> None:
    """Process 0 calls `action`, which may read the variables of `model`; the others wait, and get its error.

    Split variables are gathered before, so that nothing inside is a collective: an error in it ends no other process's
    wait too late. Process 0 holds them in host memory meanwhile.

    Args:
        action: writes the file.
        model: the model whose variables it may read.
        name: what writes, the same in all processes.
        reads: the model's variables that `action` reads.

    Raises:
        Exception: in process 0 what `action` raised.
        FlowError: in the others, when it failed.
    """
    engine = backend()
    if not is_split(model):
        return write_here(action, name)
    meeting.meet(WRITES)
    is_writer = engine.world().process_index == 0
    copies: dict[int, np.ndarray] = {}
    with meeting.together():
        for variable in [] if model is None else reads(model):
            if engine.is_split_over_processes(variable):
                value = np.asarray(variable)
                if is_writer:
                    copies[id(variable)] = value
    error: BaseException | None = None
    if is_writer:
        layers = [] if model is None else computing_layers(model)
        layers = [layer for layer in layers if any(id(each) in copies for each in own_variables(layer))]
        # what is not split too: an engine computes with values of one device, or of several processes
        computed = [each for layer in layers for each in own_variables(layer)]
        token = _copies.set(copies)
        try:
            with plain(computed, layers, {}) if computed else nullcontext():
                error = written(action)
        finally:
            _copies.reset(token)
    told(error, agreement.first_says)


def is_split(model: keras.Model | None) -> bool:
    """Whether a process holds only a part of what a file of the model has, so that it needs the others."""
    split = backend().is_split_over_processes
    return model is not None and any(split(variable) for variable in saved_variables(model))


def write_here(action: Callable[[], object], name: str) -> None:
    """Process 0 calls `action`, which needs nothing of the others: it may be the only one that comes here.

    Raises:
        Exception: in process 0 what `action` raised.
        FlowError: in another one, when it failed, or when process 0 does not come here.
    """
    if backend().world().process_index != 0:
        return told(None, lambda _: meeting.ask_first(WRITES, name))

    def tell(outcome: str) -> str:
        meeting.first_tells(name, outcome)
        return outcome

    told(written(action), tell)


def written(action: Callable[[], object]) -> Exception | None:
    """Call `action`, inside which nothing may be a collective; its error, kept until the others are told.

    Raised at once, it would leave them waiting.
    """
    token = writing.set(True)
    try:
        action()
    except Exception as raised:
        return raised
    finally:
        writing.reset(token)
    return None


def told(error: BaseException | None, tell: Callable[[str], str]) -> None:
    """Tell the other processes how the writing ended, or hear it, and raise what failed.

    Args:
        error: what `written` returned, in the process that writes.
        tell: takes the outcome of the process that writes, and returns it in all; empty where it has written.

    Raises:
        Exception: `error`, in the process that writes.
        FlowError: in the others, when that one failed.
    """
    outcome = tell("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if outcome:
        raise FlowError(f"{WRITER_FAILED}: {outcome}")
