"""`kf.callbacks.Checkpoint`: `fit` resumes where it was stopped, and makes each step once.

This file saves; `going_on` has what a `fit` that resumes does with a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_flow.backends import hooking, object_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.hooking import hook
from keras_flow.backends.rendezvous import agreement
from keras_flow.checkpoint import (
    as_json,
    callback_states,
    going_on,
    loading,
    manifest,
    names,
    positions,
    saving,
    store,
)
from keras_flow.checkpoint.lock import held
from keras_flow.checkpoint.monitor import Monitor
from keras_flow.checkpoint.reader import Reader
from keras_flow.current import models
from keras_flow.errors import FlowError, warn
from keras_flow.launch import preemption


class Checkpoint(keras.callbacks.Callback):
    """Save while `fit` runs, and resume from the last checkpoint when the program is started again.

    All is as if the program had not been stopped: weights, optimizer, random states, metrics of the epoch, the order of
    rows, history, and what other callbacks count. On the same layout the numbers are equal to the last bit.

    Args:
        directory: directory of checkpoints. A checkpoint's folder is `step-00000012` after 12 updates.
        save_freq: `"epoch"`, or a number of batches: 2 saves every two batches.
        keep: how many of the newest checkpoints to keep, besides the best one with `save_best_only`; None: all.
        asynchronous: copy the values, and write them in a thread while training goes on. The next save waits for it.
        resume: go on from the newest checkpoint of the directory. `fit` of an empty directory begins as ever.
        monitor: a log, for `save_best_only`.
        mode: `"min"`, `"max"`, or `"auto"`: a loss is minimized, and Keras's metrics say themselves which is better.
        save_best_only: save at the end of an epoch whose `monitor` is better than all before; it is saved itself, so
            that a program that is started again knows it. An epoch without that log, or with a NaN, is not saved.
        save_on_signal: save when the job is asked to end by one of these signals, and leave (`kf.on_preemption`).

    Raises:
        FlowError: in `fit`: a checkpoint cannot be written, or is of another model; no epoch had the log `monitor`, or
            it is of a metric that does not say which is better.

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
        if save_freq != "epoch" and not manifest.is_count(save_freq, 1):
            raise FlowError(f"save_freq={save_freq!r}: it is 'epoch', or a number of batches")
        saving.require_keep(keep)
        if save_best_only and (monitor is None or save_freq != "epoch"):
            raise FlowError("save_best_only=True needs monitor=, the name of a log, and save_freq='epoch'")
        if unknown := set(save_on_signal) - set(preemption.SIGNALS):
            raise FlowError(f"save_on_signal: {', '.join(map(repr, unknown))}; it knows 'SIGTERM' and 'SIGINT'")
        self.directory = store.at(directory)
        self.save_freq, self.keep, self.asynchronous = save_freq, keep, asynchronous
        self.resume, self.monitor, self.save_best_only = resume, monitor, save_best_only
        #: what is the best so far; `keep` spares its checkpoint
        self._best = Monitor(monitor, mode)
        self.save_on_signal = tuple(save_on_signal)
        self._epoch = self._batch = self._since = self._batches = self._newest = 0
        #: the first epoch of the `fit`, of one that goes on that of the first one
        self._first: int | None = None
        #: of the last step
        self._logs: Mapping[str, Any] = {}
        #: epochs that are done, where what came since the last save is still to be saved if `fit` ends here
        self._unsaved: int | None = None
        self._epoch_states: dict[str, Any] = {}
        self._is_due = False
        self._saving: saving.Saved | None = None
        self._others: list[keras.callbacks.Callback] = []
        self._history = keras.callbacks.History()
        self._begun_with: list[dict[str, Any]] = []
        #: what a `fit` that goes on has still to do
        self._left: going_on.Left | None = None
        #: Keras's loop that trains, its data, and how many sources of data there were as `fit` began
        self._loop: Any = None
        self._source: positions.Source | None = None
        self._sources = 0
        self._lock = contextlib.ExitStack()
        self._point: preemption.PreemptionPoint | None = None
        hooking.install_each(hooking.declared(sys.modules[__name__], positions))
        object_hooks.install()

    @property
    def best(self) -> float | None:
        """The best value so far of `monitor`, as in ModelCheckpoint; None: there is none yet."""
        return self._best.best

    # ---- Keras's methods

    def _is_running(self) -> None:
        """Note that this callback's `fit` is the one that runs: one inside a callback of it has ended."""
        global _current
        _current = self

    def begin(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Resume from the last checkpoint, if there is one, once all callbacks have begun."""
        # a `fit` that was broken off may have left a thread that still writes, or that has failed
        self._raise(wait=True)
        self._is_running()
        others = callbacks.callbacks
        # Keras appends its bar where `verbose` says so, which may be in process 0 alone
        kinds = keras.callbacks.History, keras.callbacks.ProgbarLogger
        self._others = [each for each in others if each is not self and not isinstance(each, kinds)]
        self._history = next(each for each in others if isinstance(each, keras.callbacks.History))
        self._begun_with = [callback_states.plain(each) for each in self._others]
        self._epoch = self._batch = self._since = self._batches = self._newest = 0
        self._left, self._is_due, self._unsaved, self._first = None, False, None, None
        self._best.begin()
        self._loop, self._source, self._sources = None, None, positions.count()
        if self.save_on_signal and (_point is None or not _point.is_open):
            self._point = _save_on_signals(self.save_on_signal)
            weakref.finalize(callbacks, self._point.close).atexit = False  # where an error ends `fit`
        self._hold()
        if self.resume:
            self._go_on()
        elif left := manifest.steps(self.directory):
            warn(
                f"{str(self.directory)!r} has checkpoints of an earlier run, up to step {left[-1]}: they stay, and a "
                "job that goes on takes the latest. Remove them, or take another directory"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the random states, from which the order of rows follows."""
        self._is_running()
        self._trained()._initial_epoch = None  # this `fit` has begun where it says, and the next one may begin anew
        self._epoch, self._batch, self._unsaved, self._is_due = epoch, 0, None, False
        if self._first is None:
            self._first = epoch if self._left is None else self._left.first
        self._epoch_states = going_on.states(self._source)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Restore the metrics of the epoch."""
        self._is_running()
        if self._left is not None and self._left.metrics:
            self._left.fill_metrics(self._trained())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save every so many batches; what a thread could not write is raised."""
        made = batch + 1 - self._batch
        self._since, self._batches, self._batch = self._since + made, self._batches + made, batch + 1
        self._logs, self._is_due = logs or {}, False
        if self._source is not None:
            self._source.trained(self._batch)
        if self._left is not None and self._left.metrics:
            warn(
                f"epoch {self._epoch} goes on from batch {self._left.batch}, and its metrics begin anew: they are made "
                "in the step itself, so that what they had cannot be given back before it"
            )
        if self._left is not None and self._left.is_ended:  # the others have counted this step before
            self._give_back(self._left.reader)
            self._is_due = True
        self._left = None
        self._raise()
        if self.save_freq != "epoch" and self._since >= int(self.save_freq):
            self._since = 0
            # the end of an epoch has more to do (validation, other callbacks): it saves when that is done. Each step
            # may be the last: data have no length or run out, or a callback ends the training
            self._is_due = True
            if not self._is_last:
                self._save(self._epoch, self._batch, self._epoch_states)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save at the end of an epoch."""
        self._left = None  # no step may have been left of it, and nobody have known
        if self.save_freq == "epoch" or self._is_due:
            self._is_due = False
            if self.save_best_only:
                if not self._best.is_better(epoch, logs or {}, self._trained()):
                    return
                self._best.step = self._step
            self._save(epoch + 1, 0, {})
        elif self._since:
            self._unsaved = epoch + 1

    def on_train_end(self, logs: Any = None) -> None:
        """Save the steps since the last save, and wait for what is being written."""
        global _current
        if self._unsaved is not None:
            self._save(self._unsaved, 0, {})
        _current, self._loop, self._trained()._initial_epoch = None, None, None
        self._lock.close()
        if self._source is not None:
            self._source.end()
            self._source = None
        self._raise(wait=True)
        if self._point is not None:
            self._point.close()
            self._point = None
        self._best.end()

    def trains(self, batches: Any) -> bool:
        """Whether it is this `fit` that reads: its data were there before it began, those of other loops were not."""
        if self._loop is None:
            return positions.source_of(batches.data_adapter).number < self._sources
        return self._loop is batches

    def steps(self, original: Callable[..., Iterator[Any]], batches: Any) -> Iterator[Any]:
        """Return the steps of an epoch; where `fit` goes on, those that are left."""
        if self._source is None:
            self._loop, self._source = batches, positions.source_of(batches.data_adapter)
            self._source.is_kept = True
        left = self._left
        if left is not None and not left.is_passed:
            steps = left.steps(original, batches, self._source, self._trained())
            self._batch, self._epoch_states = left.batch, left.epoch_states
            return steps
        self._source.at = self._epoch, self._epoch_states
        return self._source.counted(original(batches))

    # ---- saving

    def _hold(self) -> None:
        """Take the lock of the directory for as long as `fit` runs: two jobs would mix their steps."""
        self._lock.close()  # of a `fit` that was broken off
        error = ""
        if backend().world().process_index == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(held(self.directory))
            except FlowError as raised:
                error = str(raised)
            except OSError:  # it cannot be written: the first save says so
                pass
        if error := agreement.first_says(error):
            raise FlowError(error)

    def _trained(self) -> keras.Model:
        """Return the model. On JAX a model that trains gets its values back when it is asked for."""
        model = self.model
        assert model is not None
        return model

    @property
    def _is_last(self) -> bool:
        """Whether the epoch is known to have no more steps; the last one may have fewer batches than others."""
        steps = (self.params or {}).get("steps")
        return steps is not None and self._batch >= steps

    @property
    def _step(self) -> int:
        """The number of a checkpoint: updates, or trained batches where no optimizer of the model counts.

        It is never less than that of one before, which a `fit` that resumes would take for newer: an optimizer may
        count late (the gradients of the first batches overflow).
        """
        model = self._trained()
        is_late = any(
            getattr(each, "gradient_accumulation_steps", None)
            for optimizer in models.optimizers_of(model)
            for each in models.with_inner(optimizer)
        )
        self._newest = max(self._newest, saving.step_of(model) or (0 if is_late else self._batches))
        return self._newest

    def _save(self, epoch: int, batch: int, epoch_states: Mapping[str, Any], now: bool = False) -> None:
        model, self._unsaved = self._trained(), None
        self._raise(wait=True)
        if (distribution := models.remembered(model)) is not None:
            distribution.finish_steps(model)
        logs = {name: as_json.encoded(list(values)) for name, values in self._history.history.items()}
        training = {
            "epoch": epoch,
            "batch": batch,
            "first": self._first,
            "batches": self._batches,
            "since": self._since,
            "epoch_states": dict(epoch_states),
            "states": going_on.states(None if batch else self._source),
            "data": self._data_at(batch),
            "history": {"epoch": list(self._history.epoch), "logs": logs},
            "best": self._best.best,
            "best_step": self._best.step,
            "is_over": bool(getattr(model, "stop_training", False)) and not batch,
            "callbacks": [
                [type(each).__name__, callback_states.state_of(each, begun)]
                for each, begun in zip(self._others, self._begun_with, strict=True)
            ],
        }
        if self._loop is not None and self._source is not None:
            is_long, is_known = self._loop.steps_per_epoch is not None, (self.params or {}).get("steps") is not None
            training["sizes"] = going_on.sizes(self._loop)
            training["pass"] = self._source.begun if is_long else None
            # there may be no step after it
            training["logs"] = as_json.encoded(_numbers(self._logs)) if batch and (is_long or not is_known) else {}
        beside = dict(names.metrics_of(model)) if batch else {}
        beside |= callback_states.arrays_of(self._others)
        is_thread = self.asynchronous and not now
        self._saving = saving.save_with(
            self.directory, model, self._step, is_thread, self.keep, {}, training, beside, spared=self._best.step
        )

    def _data_at(self, batch: int) -> dict[str, Any] | None:
        """Say where the data are, as JSON has it."""
        if self._source is None:
            return None
        return self._source.said(
            bool(batch) or self._loop.steps_per_epoch is not None, self._loop.data_adapter.num_batches
        )

    def save_now(self) -> None:
        """Save between two steps, because the job is asked to end."""
        if not self._is_last:
            self._save(self._epoch, self._batch, self._epoch_states, now=True)
            return
        # the epoch is over but for its end, where Keras wants a step: what is left out is its validation
        self._history.on_epoch_end(self._epoch, _numbers(self._trained().get_metrics_result()))
        self._save(self._epoch + 1, 0, {}, now=True)

    def _raise(self, wait: bool = False) -> None:
        if self._saving is not None and (wait or self._saving.is_done()):
            done, self._saving = self._saving, None
            done.wait()

    # ---- going on

    def _go_on(self) -> None:
        step = loading.newest(self.directory)
        if step is None:
            return
        reader = Reader(*manifest.read(self.directory, step))
        self._newest = loading.load_from(reader, self._trained()).step
        training = reader.manifest.training
        if not training:  # saved outside of `fit`: the weights are those, and the epochs begin
            return
        # as Keras's own BackupAndRestore says where `fit` goes on (checked with 3.15)
        self._trained()._initial_epoch = training["epoch"]
        self._history.epoch = training["history"]["epoch"]
        self._history.history = as_json.decoded(training["history"]["logs"])
        self._best.best, self._best.step = training["best"], training.get("best_step")
        self._give_back(reader)
        if training.get("is_over"):  # a callback has ended it: no epoch is left
            self._trained()._initial_epoch = (self.params or {})["epochs"]
        self._left = going_on.Left(reader)
        if self.save_freq != "epoch":  # saved at the same steps as without the stop
            self._since = training.get("since", step % int(self.save_freq))
        self._batches = training.get("batches", 0)
        if self._trained()._initial_epoch >= (self.params or {})["epochs"] and not self._left.batch:
            going_on.set_states(training["states"])  # nothing to do: a `fit` that the program calls then begins as ever
        if backend().world().process_index == 0:
            said = self._left.said((self.params or {})["epochs"], bool(training.get("is_over")))
            print(f"keras_flow: {said}", file=sys.stderr, flush=True)

    def _give_back(self, reader: Reader) -> None:
        """Restore what the other callbacks had counted, each of those that are here too."""
        states, here = reader.manifest.training["callbacks"], callback_states.numbered(self._others)
        there = dict(
            zip(callback_states.numbers([name for name, _ in states]), (each for _, each in states), strict=True)
        )
        for key in here.keys() & there.keys():
            callback_states.set_state(here[key], there[key])
        callback_states.set_arrays(here, reader)
        if left := [name for (name, number), state in there.items() if state and (name, number) not in here]:
            warn(f"the checkpoint has callbacks {left}, which this fit has not: what they counted is not given back")


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of metrics as Keras gives logs to callbacks: numbers, or arrays."""
    arrays = {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in found.items()}
    return {name: array.item() if array.size == 1 else array for name, array in arrays.items()}


#: the callback of the `fit` that runs
_current: Checkpoint | None = None


# ---- signals


#: where a program saves when it is asked to end
_point: preemption.PreemptionPoint | None = None


def _save_on_signals(signals: Sequence[str]) -> preemption.PreemptionPoint:
    global _point
    try:
        _point = preemption.on_preemption(lambda: None if _current is None else _current.save_now(), signals)
        return _point
    except FlowError as error:
        raise FlowError(
            f"Checkpoint saves on a signal by kf.on_preemption: {error}; or give it save_on_signal=()"
        ) from error


# ---- hooks


def _of(callbacks: keras.callbacks.CallbackList, *args: object, **kwargs: object) -> Checkpoint | None:
    """Return a `fit`'s callback; without one, that of an interrupted `fit`, or of one that runs around this one."""
    return next((each for each in callbacks.callbacks if isinstance(each, Checkpoint)), _current)


@object_hooks.replaces("keras.callbacks.CallbackList", "on_train_begin", when=_of)
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
    _current = None
    if callback not in callbacks.callbacks:
        original(callbacks, *args, **kwargs)
        return
    if len(several := [str(each.directory) for each in callbacks.callbacks if isinstance(each, Checkpoint)]) > 1:
        raise FlowError(
            f"fit has {len(several)} callbacks kf.callbacks.Checkpoint ({', '.join(map(repr, several))}), and goes on "
            "from one: give it one, and keras.callbacks.ModelCheckpoint for files beside it"
        )
    callbacks.callbacks.remove(callback)
    callbacks.callbacks.append(callback)
    original(callbacks, *args, **kwargs)
    callback.begin(callbacks)


def _trains(batches: object) -> Checkpoint | None:
    """Condition of the hook: the callback, where the batches are read by its `fit`."""
    return _current if _current is not None and _current.trains(batches) else None


@hook(
    "keras:EpochIterator",
    "_enumerate_iterator",
    "kf.callbacks.Checkpoint: batches that were trained are passed over",
    when=_trains,
)
def _steps(callback: Checkpoint, original: Callable[..., Iterator[Any]], batches: Any) -> Iterator[Any]:
    """Hook on `EpochIterator._enumerate_iterator`: what was trained is passed over, and it is counted what is read."""
    return callback.steps(original, batches)
