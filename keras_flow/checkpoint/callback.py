"""`kf.callbacks.Checkpoint`: `fit` goes on where it was stopped, and makes each step once.

A checkpoint in the middle of an epoch holds two sets of random states: those at the begin of the epoch, from which its
order of rows and what its data draw follow, and those of the moment. A `fit` that goes on begins the epoch with the
first, passes over the batches that were trained, and continues with the second.

Example: 4 batches an epoch, killed in batch 2 of epoch 5; the last checkpoint was made after batch 1.

    epochs 0 to 4    their iterators are made, in case the data count epochs; nothing is trained
    epoch 5          batches 0 and 1 are read and dropped, 2 and 3 are trained
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_flow.backends import agreement, hooking, random_states, row_order
from keras_flow.backends.active import backend
from keras_flow.checkpoint import loading, manifest, names, saving
from keras_flow.checkpoint.reader import Reader
from keras_flow.errors import FlowError, warn
from keras_flow.launch import preemption

#: values of attributes that are kept for other callbacks
_PLAIN = (bool, int, float, str, type(None))


class Checkpoint(keras.callbacks.Callback):
    """Save while `fit` runs, and go on from the last checkpoint where a program is started again.

    All is as if the program had not been stopped: weights, optimizer, random states, metrics of the epoch, the order of
    rows, history, and what other callbacks count. On the same layout the numbers are equal to the last bit.

    Args:
        directory: of checkpoints; the folder of one is `step-N`, after N updates.
        save_freq: `"epoch"`, or a number of batches.
        keep: how many of the newest checkpoints stay; None: all.
        asynchronous: copy the values, and write them in a thread while training goes on. The next save waits for it.
        resume: go on from the newest checkpoint of the directory. `fit` of an empty directory begins as ever.
        monitor: a log, for `save_best_only`.
        mode: `"min"`, `"max"`, or `"auto"`: by the name of the log.
        save_best_only: save at the end of an epoch whose `monitor` is better than all before; it is saved itself, so
            that a program that is started again knows it.
        save_on_signal: save when the job is asked to end by one of these signals, and leave (`kf.on_preemption`).

    Raises:
        FlowError: in `fit`: a checkpoint cannot be written, or is of another model.

    Example:
        >>> import keras, numpy as np, tempfile, keras_flow as kf
        >>> ranks, folder = kf.init(4), tempfile.mkdtemp()
        >>> def program(epochs):
        ...     keras.utils.set_random_seed(1)
        ...     with kf.DataParallel().scope():
        ...         model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        ...         model.compile("sgd", "mse")
        ...     callback = kf.callbacks.Checkpoint(folder, save_on_signal=())
        ...     x = np.ones((8, 4), "float32")
        ...     return model.fit(x, x[:, :1], batch_size=4, epochs=epochs, callbacks=[callback], verbose=0)
        >>> first = program(2)
        >>> program(3).epoch
        [0, 1, 2]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        keep: int | None = 3,
        asynchronous: bool = True,
        resume: bool = True,
        monitor: str | None = None,
        mode: str = "auto",
        save_best_only: bool = False,
        save_on_signal: Sequence[str] = ("SIGTERM",),
    ):
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise FlowError(f"save_freq={save_freq!r}: it is 'epoch', or a number of batches")
        if mode not in ("auto", "min", "max"):
            raise FlowError(f"mode={mode!r}: it is 'auto', 'min' or 'max'")
        if save_best_only and (monitor is None or save_freq != "epoch"):
            raise FlowError("save_best_only=True needs monitor=, the name of a log, and save_freq='epoch'")
        if unknown := set(save_on_signal) - {"SIGTERM", "SIGINT"}:
            raise FlowError(f"save_on_signal: {', '.join(map(repr, unknown))}; it knows 'SIGTERM' and 'SIGINT'")
        self.directory, self.save_freq, self.keep, self.asynchronous = Path(directory), save_freq, keep, asynchronous
        self.resume, self.monitor, self.save_best_only = resume, monitor, save_best_only
        is_max = mode == "max" or (mode == "auto" and any(part in (monitor or "") for part in ("acc", "auc", "f1")))
        self._is_better: Callable[[float, float], bool] = (lambda a, b: a > b) if is_max else (lambda a, b: a < b)
        self.save_on_signal = tuple(save_on_signal)
        self.best: float | None = None
        self._epoch = self._batch = self._since = 0
        self._epoch_states: dict[str, Any] = {}
        self._is_due = False
        self._saving: saving.Saved | None = None
        self._others: list[keras.callbacks.Callback] = []
        self._history = keras.callbacks.History()
        self._begun_with: list[dict[str, Any]] = []
        #: what a `fit` that goes on has still to do
        self._left: _Left | None = None
        hooking.install_each(_HOOKS)

    # ---- Keras's methods

    def _is_running(self) -> None:
        """A `fit` in a callback has ended, if there was one."""
        global _current
        _current = self

    def begin(self, others: Sequence[keras.callbacks.Callback]) -> None:
        """All callbacks have begun: go on from the last checkpoint, if there is one."""
        self._is_running()
        self._others = [each for each in others if each is not self and not isinstance(each, keras.callbacks.History)]
        self._history = next(each for each in others if isinstance(each, keras.callbacks.History))
        self._begun_with = [_plain(each) for each in self._others]
        self._epoch = self._batch = self._since = 0
        self._left, self._is_due, self._saving = None, False, None
        if self.save_on_signal:
            _save_on_signals()
        if self.resume:
            self._go_on()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the random states, from which the order of rows follows."""
        self._is_running()
        self._epoch, self._batch = epoch, 0
        if self._left is None or epoch != self._left.epoch:
            self._epoch_states = _states()
        else:
            self._epoch_states = self._left.epoch_states

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Give the metrics of the epoch what they had."""
        self._is_running()
        if self._left is not None and self._left.metrics:
            self._left.fill_metrics(self._trained())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save every so many batches; what a thread could not write is raised."""
        self._since += batch + 1 - self._batch
        self._batch = batch + 1
        if self._left is not None and self._left.metrics:
            warn(
                f"epoch {self._epoch} goes on from batch {self._left.batch}, and its metrics begin anew: they are made "
                "in the step itself, so that what they had cannot be given back before it"
            )
        self._left = None
        self._raise()
        if self.save_freq != "epoch" and self._since >= int(self.save_freq):
            self._since = 0
            # the end of an epoch has more to do (validation, other callbacks): it saves when that is done
            self._is_due = self._batch == (self.params or {}).get("steps")
            if not self._is_due:
                self._save(self._epoch, self._batch, self._epoch_states)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save at the end of an epoch."""
        if self.save_freq == "epoch" or self._is_due:
            self._is_due = False
            if self.save_best_only and not self._is_best(epoch, logs or {}):
                return
            self._save(epoch + 1, 0, {})

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for what is being written."""
        global _current
        _current = None
        self._raise(wait=True)

    # ---- saving

    def _trained(self) -> keras.Model:
        """The model; on JAX one that trains gets its values back when it is asked for."""
        model = self.model
        assert model is not None
        return model

    def _is_best(self, epoch: int, logs: Mapping[str, Any]) -> bool:
        if self.monitor is None or self.monitor not in logs:
            known = ", ".join(sorted(logs))
            raise FlowError(f"Checkpoint(monitor={self.monitor!r}): epoch {epoch} has no such log; there are {known}")
        value = float(logs[self.monitor])
        if self.best is not None and not self._is_better(value, self.best):
            return False
        self.best = value
        return True

    def _save(self, epoch: int, batch: int, epoch_states: Mapping[str, Any], now: bool = False) -> None:
        model = self._trained()
        self._raise(wait=True)
        logs = {name: list(map(float, values)) for name, values in self._history.history.items()}
        training = {
            "epoch": epoch,
            "batch": batch,
            "epoch_states": dict(epoch_states),
            "states": _states(),
            "history": {"epoch": list(self._history.epoch), "logs": logs},
            "best": self.best,
            "callbacks": [
                [type(each).__name__, _state_of(each, begun)]
                for each, begun in zip(self._others, self._begun_with, strict=True)
            ],
        }
        metrics = names.metrics_of(model) if batch else {}
        is_thread = self.asynchronous and not now
        self._saving = saving.save_with(self.directory, model, None, is_thread, self.keep, {}, training, metrics)

    def save_now(self) -> None:
        """Save between two steps, because the job is asked to end."""
        if self._batch != (self.params or {}).get("steps"):
            self._save(self._epoch, self._batch, self._epoch_states, now=True)
            return
        # the epoch is over but for its end, where Keras wants a step: what is left out is its validation
        self._history.on_epoch_end(self._epoch, self._trained().get_metrics_result())
        self._save(self._epoch + 1, 0, {}, now=True)

    def _raise(self, wait: bool = False) -> None:
        if self._saving is not None and (wait or self._saving.is_done()):
            done, self._saving = self._saving, None
            done.wait()

    # ---- going on

    def _go_on(self) -> None:
        there = manifest.steps(self.directory) if backend().world().process_index == 0 else []
        step = agreement.first_says(str(there[-1]) if there else "")
        if not step:
            return
        reader = Reader(*manifest.read(self.directory.absolute(), int(step)))
        loading.load_from(reader, self._trained())
        training = reader.manifest.training
        if not training:  # saved outside of `fit`: the weights are those, and the epochs begin
            return
        # as Keras's own BackupAndRestore says where `fit` goes on (checked with 3.15)
        self._trained()._initial_epoch = training["epoch"]
        self._history.epoch, self._history.history = training["history"]["epoch"], training["history"]["logs"]
        self.best = training["best"]
        kept = [name for name, _ in training["callbacks"]]
        if kept == [type(each).__name__ for each in self._others]:
            for each, (_, state) in zip(self._others, training["callbacks"], strict=True):
                _set_state(each, state)
        elif any(state for _, state in training["callbacks"]):
            warn(f"the checkpoint has callbacks {kept}, and this fit has others: what they counted is not given back")
        if any(getattr(each, "restore_best_weights", False) for each in self._others):
            warn("EarlyStopping(restore_best_weights=True): the best weights of before are in no checkpoint")
        self._left = _Left(
            training["epoch"], training["batch"], training["epoch_states"] or training["states"], training["states"]
        )
        self._left.metrics = {name: name for name in reader.manifest.tensors if name.startswith("@metrics/")}
        self._left.reader = reader
        if backend().world().process_index == 0:
            where = f"epoch {training['epoch']}" + (f", batch {training['batch']}" if training["batch"] else "")
            print(f"keras_flow: going on from {reader.folder}: {where} (both from 0)", file=sys.stderr, flush=True)


class _Left:
    """What a `fit` that goes on has still to do in its first epoch.

    Args:
        epoch: with which it goes on.
        batch: how many batches of it were trained.
        epoch_states: random states at its begin.
        states: random states after these batches.
    """

    def __init__(self, epoch: int, batch: int, epoch_states: dict[str, Any], states: dict[str, Any]):
        self.epoch, self.batch, self.epoch_states, self.states = epoch, batch, epoch_states, states
        self.metrics: dict[str, str] = {}
        self.reader: Reader | None = None

    def fill_metrics(self, model: keras.Model) -> None:
        """Give the metrics that are built their values."""
        assert self.reader is not None
        for name, variable in names.metrics_of(model).items():
            if name in self.metrics:
                loading.fill(variable, self.reader, self.metrics.pop(name))


#: the callback of the `fit` that runs
_current: Checkpoint | None = None


def _states() -> dict[str, Any]:
    return {"random": random_states.states(), "rows": row_order.state()}


def _set_states(states: Mapping[str, Any]) -> None:
    random_states.set_states(states["random"])
    row_order.set_state(states["rows"])


def _plain(callback: object) -> dict[str, Any]:
    """The attributes of a callback that are numbers and texts, as JSON has them."""
    found = {}
    for name, value in vars(callback).items():
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, _PLAIN) and not name.startswith("_"):
            found[name] = value
    return found


def _state_of(callback: Any, begun: Mapping[str, Any]) -> dict[str, Any]:
    """What a callback has counted: what its `get_state` says, or its attributes that have changed since it began."""
    if hasattr(callback, "get_state"):
        return json.loads(json.dumps(callback.get_state()))
    return {name: value for name, value in _plain(callback).items() if name not in begun or begun[name] != value}


def _set_state(callback: Any, state: Mapping[str, Any]) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(state)
    else:
        vars(callback).update(state)


# ---- signals


#: where a program saves when it is asked to end
_point: preemption.PreemptionPoint | None = None


def _save_on_signals() -> None:
    global _point
    if _point is not None:
        return
    try:
        _point = preemption.on_preemption(lambda: None if _current is None else _current.save_now())
    except FlowError as error:
        raise FlowError(
            f"Checkpoint saves on a signal by kf.on_preemption: {error}; or give it save_on_signal=()"
        ) from error


# ---- hooks


def _of(callbacks: keras.callbacks.CallbackList, *args: object, **kwargs: object) -> Checkpoint | None:
    """The callback of a `fit`; of one without it that of a `fit` that was broken off, or that runs around this one."""
    return next((each for each in callbacks.callbacks if isinstance(each, Checkpoint)), _current)


def _all_begin(
    callback: Checkpoint,
    original: Callable[..., None],
    callbacks: keras.callbacks.CallbackList,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Hook on `CallbackList.on_train_begin`: what all callbacks set at the begin is set to what it was.

    From here on the others come first, so that a checkpoint has what they did in the same batch and epoch.
    """
    global _current
    if callback not in callbacks.callbacks:
        _current = None
        original(callbacks, *args, **kwargs)
        return
    callbacks.callbacks.remove(callback)
    callbacks.callbacks.append(callback)
    original(callbacks, *args, **kwargs)
    callback.begin(callbacks.callbacks)


def _goes_on(*args: object, **kwargs: object) -> _Left | None:
    return None if _current is None else _current._left


def _epochs_before(left: _Left, original: Callable[..., Iterator[Any]], batches: Any) -> Iterator[Any]:
    """Hook on `EpochIterator._enumerate_iterator`: pass over what was trained."""
    first, left.epoch = left.epoch, -1
    if first < 0:  # another loop, in a callback
        yield from original(batches)
        return
    # of data that go on from epoch to epoch all is read; a shuffle that counts epochs begins them
    is_read = batches.steps_per_epoch is not None or batches.num_batches is None
    for _ in range(first):
        with batches.catch_stop_iteration():
            _pass_over(original(batches), None, batches.steps_per_execution if is_read else 0)
    _set_states(left.epoch_states)
    epoch = original(batches)
    data = _pass_over(epoch, left.batch, batches.steps_per_execution)
    if left.metrics and _current is not None:
        _build_metrics(_current._trained(), data)
    _set_states(left.states)
    yield from epoch


def _build_metrics(model: keras.Model, data: Any) -> None:
    """Make the variables of metrics, which Keras on TensorFlow makes with the first step, from a batch."""
    if names.metrics_are_built(model):
        return
    # of a model with a step of its own, and without a call, it is said after its first step
    with contextlib.suppress(Exception):
        model._symbolic_build(data_batch=data)


def _pass_over(epoch: Iterator[Any], count: int | None, read: int) -> Any:
    """Drop the first `count` batches of an epoch, or all; what was read last.

    Args:
        epoch: Keras's iterator, which yields the numbers of a step and what the step reads.
        count: batches; None: all.
        read: batches that a step reads; 0: the first step alone reads one, with which an iterator begins.
    """
    passed, data = 0, None
    while count is None or passed < count:
        step = next(epoch, None)
        if step is None:
            break
        _, last, iterator = step
        for _ in range(read if passed else max(read, 1)):
            data = next(iterator, None)
        passed = last + 1
    return data


_HOOKS = (
    hooking.Hook(
        "keras.callbacks.CallbackList",
        "on_train_begin",
        _all_begin,
        "kf.callbacks.Checkpoint: what callbacks set at their begin is set to what it was",
        when=_of,
    ),
    hooking.Hook(
        "keras:EpochIterator",
        "_enumerate_iterator",
        _epochs_before,
        "kf.callbacks.Checkpoint: batches that were trained are passed over",
        when=_goes_on,
    ),
)
