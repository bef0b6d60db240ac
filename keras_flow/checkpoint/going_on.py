"""The first epoch of a `fit` that goes on: what was trained is passed over, in the order of rows that it had.

A checkpoint in the middle of an epoch holds two sets of random states: those at the begin of the epoch, from which its
order of rows and what its data draw follow, and those of the moment. A `fit` that goes on begins the epoch with the
first, passes over the batches that were trained, and continues with the second.

Example: 4 batches an epoch, killed in batch 2 of epoch 5; the last checkpoint was made after batch 1.

    epochs 0 to 4    their iterators are made, in case the data count epochs; nothing is trained
                     (a pass that is longer than an epoch is read from its begin, in the order that it had)
    epoch 5          batches 0 and 1 are read and dropped, 2 and 3 are trained

Data that can say where they are (`positions`) go on there, and none of their batches is read twice.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from keras_flow.backends import random_states
from keras_flow.backends.reading import row_order
from keras_flow.checkpoint import as_json, loading, names
from keras_flow.checkpoint.positions import Source
from keras_flow.checkpoint.reader import Reader
from keras_flow.errors import warn


def states(source: Source | None) -> dict[str, Any]:
    """Return the random states, the order of rows, and what a source of data remembers between two epochs."""
    between = None if source is None else source.between()
    return {"random": random_states.states(), "rows": row_order.state(), "data": between}


def set_states(given: Mapping[str, Any], source: Source | None = None) -> None:
    """Restore what `states` returned; the source only where there is one."""
    random_states.set_states(given["random"])
    row_order.set_state(given["rows"])
    if source is not None and given.get("data") is not None:
        source.set_between(given["data"])


def sizes(batches: Any) -> dict[str, Any]:
    """Return what the batches that were trained are counted in: how many an epoch has, and their rows, where known."""
    adapter = batches.data_adapter
    return {"steps": batches.steps_per_epoch or adapter.num_batches, "batch_size": adapter.batch_size}


class Left:
    """The rest of the epoch in which a `fit` resumes.

    Args:
        reader: reads the checkpoint.

    Attributes:
        epoch: the epoch in which it resumes.
        batch: how many batches of that epoch were trained.
        first: the first epoch of the `fit` that began.
        epoch_states: the random states at the epoch's begin.
        metrics: names of the metrics whose values are not restored yet.
        is_passed: whether the steps that are left were asked for.
        is_ended: whether no step of the epoch was left, so that its end alone is made.
    """

    def __init__(self, reader: Reader):
        self.reader, training = reader, reader.manifest.training
        self.epoch, self.batch, self.first = training["epoch"], training["batch"], training.get("first", 0)
        self.epoch_states = training["epoch_states"] or training["states"]
        self._states, self._data = training["states"], training.get("data")
        #: the epoch in which the pass was begun that is under way, and its random states
        self._begun = training.get("pass") or (self.epoch, self.epoch_states)
        self.metrics = {name for name in reader.manifest.tensors if name.startswith(names.METRICS)}
        self.is_passed = self.is_ended = False

    def fill_metrics(self, model: keras.Model) -> None:
        """Restore the values of the metrics that are built."""
        for name, variable in names.metrics_of(model).items():
            if name in self.metrics:
                self.metrics.remove(name)
                loading.fill(variable, self.reader, name)

    def steps(
        self, original: Callable[..., Iterator[Any]], batches: Any, source: Source, model: keras.Model
    ) -> Iterator[Any]:
        """Pass over what was trained, and return the steps of the epoch that are left.

        Args:
            original: Keras's method that gives the steps of an epoch: numbers, and the iterator that a step reads.
            batches: Keras's iterator of the epoch, which has this method.
            source: the source of the data.
            model: the model that is trained.
        """
        self.is_passed, is_counted = True, bool(self.batch)
        self._compare(sizes(batches), batches.steps_per_epoch is not None and not source.can_say)
        # of data that go on from epoch to epoch all is read; a shuffle that counts epochs begins them
        is_read = batches.steps_per_epoch is not None or batches.num_batches is None
        size = batches.steps_per_execution
        # those that say where they are, and not how many batches they have, begin each epoch anew
        counts = not source.can_say or batches.num_batches is not None
        for epoch in range(self.first if counts else self.epoch, self.epoch):
            if epoch == self._begun[0]:
                source.at = self._begun
                set_states(self._begun[1], source)
            with batches.catch_stop_iteration():
                _pass_over(source.counted(original(batches)), None, 0 if source.can_say else size, is_read)
        set_states(self.epoch_states, source)
        if not is_counted and row_order.by_position():
            row_order.begin(self.epoch)
            self.epoch_states = states(source)
        source.at = self.epoch, self.epoch_states
        epoch, data = source.counted(original(batches)), None
        if self._data is not None:
            if self.metrics and not names.metrics_are_built(model):
                with random_states.unchanged():
                    data = next(iter(batches.data_adapter.get_numpy_iterator()), None)
            _pass_over(epoch, self.batch, 0)
            set_states(self._begun[1], source)  # the rows that are left have the order of their pass
            source.go_on(self._data)
        else:
            data = _pass_over(epoch, self.batch, size)
        if self.metrics:
            _build_metrics(model, data)
        set_states(self._states if self.batch else self.epoch_states)
        if self.batch and (left := _left(epoch, batches)) is None:
            self.is_ended = True
            return self._end(model)
        return left if self.batch else epoch

    def _compare(self, here: Mapping[str, Any], is_read: bool) -> None:
        """Begin the epoch anew, and say so, where batches are others than those that were trained.

        Args:
            here: the `sizes` of this `fit`.
            is_read: passes are longer than an epoch, and batches are passed over by their number.
        """
        there = self.reader.manifest.training.get("sizes", here)
        if there == here or not (self.batch or is_read):
            return
        shown = ", ".join(f"{name} is {here[name]} and was {there[name]}" for name in here if here[name] != there[name])
        begins = f"epoch {self.epoch} begins anew" if self.batch else f"epoch {self.epoch} begins with other rows"
        warn(f"{self.reader.folder} was saved by a fit with other batches ({shown}): {begins}")
        if self.batch:
            self.batch, self._data, self.metrics = 0, None, set()

    def _end(self, model: Any) -> Iterator[Any]:
        """Yield a step that trains nothing, and has the logs of the last one: Keras ends an epoch after a step only."""
        logs = as_json.decoded(self.reader.manifest.training.get("logs", {}))
        step = model.train_function
        # JAX's steps have the state before their batch, and return it
        model.train_function = lambda *given: logs if len(given) == 1 else (logs, given[0])
        try:
            yield self.batch - 1, self.batch - 1, itertools.repeat(None)
        finally:
            model.train_function = step

    def said(self, epochs: int, is_ended: bool) -> str:
        """Return the line that tells the user where `fit` goes on, or that it has nothing to do.

        Args:
            epochs: the argument of `fit`.
            is_ended: a callback had ended the training, such as EarlyStopping.
        """
        folder = self.reader.folder
        if is_ended and self.epoch < epochs:
            return f"a callback ended the training after {self.epoch} of {epochs} epochs: nothing to do ({folder})"
        if self.epoch >= epochs:
            done = (
                f"{self.epoch} of {epochs} epochs" if self.epoch == epochs else f"{self.epoch} epochs, asked: {epochs}"
            )
            return f"training is complete ({done}): nothing to do ({folder})"
        where = f"epoch {self.epoch} (counted from 0)"
        if self.batch:
            where = f"epoch {self.epoch}, batch {self.batch} (both counted from 0)"
            # data that cannot say where they are have no other way to this batch
            where += "; the batches before it are read again and dropped" if self._data is None else ""
        return f"going on from {folder}: {where}"


def _build_metrics(model: keras.Model, data: Any) -> None:
    """Make the variables of metrics from a batch, since Keras on TensorFlow makes them with the first step."""
    if names.metrics_are_built(model):
        return
    # of a model with a step of its own, and without a call, it is said after its first step
    with contextlib.suppress(Exception):
        model._symbolic_build(data_batch=data)


def _pass_over(epoch: Iterator[Any], count: int | None, size: int, is_read: bool = True) -> Any:
    """Drop the first `count` batches of an epoch, or all; return what was read last.

    Args:
        epoch: Keras's iterator, which yields the numbers of a step and what the step reads.
        count: batches; None: all.
        size: batches that a step reads; 0: nothing is read.
        is_read: every step reads; otherwise the first alone reads a batch, with which an iterator begins.

    Raises:
        StopIteration: all were asked for, and the data ended before the epoch.
    """
    passed, data = 0, None
    while (count is None or passed < count) and (step := next(epoch, None)) is not None:
        _, last, iterator = step
        found = itertools.islice(iterator, size if is_read else int(not passed and size > 0))
        read = list(found)
        if is_read and size and not read and count is None:
            raise StopIteration  # which of data of unknown length ends an epoch
        data, passed = read[-1] if read else data, last + 1
    return data


def _left(epoch: Iterator[Any], batches: Any) -> Iterator[Any] | None:
    """Return the steps of an epoch that are left; None where none is, which data of unknown length say when read."""
    step = next(epoch, None)
    is_known = batches.steps_per_epoch is not None or batches.data_adapter.num_batches is not None
    # what was read from an iterator of tf.data cannot be put back
    if step is not None and not is_known and not hasattr(step[2], "element_spec"):
        read = list(itertools.islice(step[2], 1))
        if not read:
            batches.data_adapter.on_epoch_end()
        step = (*step[:2], itertools.chain(read, step[2])) if read else None
    return None if step is None else itertools.chain([step], epoch)
