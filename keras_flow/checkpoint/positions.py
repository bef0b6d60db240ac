"""Sources of data that can say where they are: a `fit` that goes on reads no batch of them twice.

    grain (DataLoader, MapDataset, IterDataset)    its iterator: get_state, set_state
    torchdata's StatefulDataLoader                 state_dict, load_state_dict
    a PyDataset with get_state and set_state       what it remembers; the number of the batch is known
    a DataLoader's generator, its sampler's        their states, with which an epoch begins

Engines read ahead, so that a source is further than the batches that were trained. So the state after each batch is
kept until the batch is trained.

Example: batches 0 and 1 are trained, and TensorFlow has read 2 and 3. Kept are the states after 1, 2 and 3; a
checkpoint gets that after 1.

Everything else is read again from the begin of the epoch, and its batches are dropped.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_flow.backends.hooking import always, hook
from keras_flow.backends.reading.py_datasets import OwnRowsPyDataset
from keras_flow.checkpoint.as_json import decoded, encoded

#: the attribute of Keras's adapter that has its source
_ATTRIBUTE = "_keras_flow_source"
_numbers = itertools.count()


class Source:
    """A source of data; this one cannot say where it is.

    Args:
        users: what the program gave to `fit`.

    Attributes:
        users: the same.
        number: the sources of a process are counted.
        consumed: batches of the running pass that are trained.
        at: the epoch that runs, and the random states at its begin.
        begun: the same of the epoch in which the running pass was begun, with `steps_per_epoch` an earlier one.
        is_kept: a `fit` with a Checkpoint reads it, so that states are kept.
    """

    can_say = False

    def __init__(self, users: Any):
        self.users, self.consumed, self.is_kept = users, 0, False
        self.number = next(_numbers)
        self._taken: object = None
        self.at: tuple[int, Any] = (0, None)
        self.begun = self.at
        #: batches of the pass that steps were asked for, and those before this epoch
        self._asked = self._before = 0
        self._given = 0
        self._states: dict[int, Any] = {}
        self._is_over = False
        #: batches that are trained, and the iterator that gives those after them
        self._start: tuple[int, Iterator[Any]] | None = None

    # ---- of each kind

    def between(self) -> Any:
        """Return what the source remembers between two epochs, fit for JSON."""
        return None

    def set_between(self, state: Any) -> None:
        """Restore what `between` returned."""

    def _state(self, batches: Iterator[Any]) -> Any:
        """Return the position of a pass."""
        raise NotImplementedError

    def _continued(self, state: Any, count: int) -> Iterator[Any]:
        """Yield the batches of a pass after the first `count`."""
        raise NotImplementedError

    # ---- reading

    def counted(self, steps: Iterator[tuple[int, int, Any]]) -> Iterator[tuple[int, int, Any]]:
        """Return the steps of an epoch (first and last number, iterator), and count what they take of a pass."""
        # engines ask for steps ahead of those that they train, within an epoch
        for first, last, iterator in steps:
            if iterator is not self._taken:
                self._taken, self._asked, self.begun = iterator, 0, self.at
            if first == 0:
                self._before = self.consumed = self._asked
            self._asked += last + 1 - first
            yield first, last, iterator

    def trained(self, batch: int) -> None:
        """Note that so many batches of the epoch are trained."""
        self.consumed = self._before + batch

    def batches(self, begun: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of a pass, and keep where it is after each; the first pass after `go_on` goes on."""
        start, self._start = self._start, None
        given, states = 0, {}
        self._given, self._states, self._is_over = given, states, False
        if start is not None:
            given, begun = start
        for batch in begun:
            given += 1
            if self.is_kept:
                states[given] = encoded(self._state(begun))
                for old in [count for count in states if count < self.consumed]:
                    del states[old]
            self._given = given
            yield batch
        self._is_over = self._states is states

    def said(self, continues: bool, batches: int | None) -> dict[str, Any] | None:
        """Say where a `fit` goes on, as JSON has it; None: at the begin of an epoch, or nobody knows.

        Args:
            continues: a pass is not over at the end of an epoch (`steps_per_epoch`), or an epoch is under way.
            batches: how many batches a pass has, where that is known.
        """
        is_over = self.consumed >= batches if batches else self._is_over and self.consumed >= self._given
        if not continues or is_over or self.consumed not in self._states:
            return None
        return {"batches": self.consumed, "state": self._states[self.consumed]}

    def go_on(self, said: dict[str, Any]) -> None:
        """Let the next pass continue at the position that `said` returned.

        The pass is begun now, while the random states are those of its begin.
        """
        self._start = (said["batches"], self._continued(decoded(said["state"]), said["batches"]))

    @property
    def goes_on(self) -> bool:
        """Whether the next pass goes on, and has begun."""
        return self._start is not None

    def end(self) -> None:
        """Let go of what belongs to a `fit`."""
        self._taken, self.is_kept = None, False
        self._states.clear()


class _PyDataset(Source):
    can_say = True

    def __init__(self, users: Any, adapter: Any):
        super().__init__(users)
        self._adapter = adapter
        adapter._get_iterator = lambda: self.batches(type(adapter)._get_iterator(adapter))

    def between(self) -> Any:
        return encoded(self.users.get_state())

    def set_between(self, state: Any) -> None:
        self.users.set_state(decoded(state))

    def said(self, continues: bool, batches: int | None) -> dict[str, Any] | None:
        found = super().said(continues, batches)
        if found is not None and self.consumed == self._given:
            found["state"] = self.between()  # its `on_epoch_end` may have changed it since the batch was read
        return found

    def _state(self, batches: Iterator[Any]) -> Any:
        return self.users.get_state()

    def _continued(self, state: Any, count: int) -> Iterator[Any]:
        # Keras's generator asks the dataset for batch after batch; those that were trained are not read
        batches = type(self._adapter)._get_iterator(self._adapter)
        dataset, self._adapter.py_dataset = self._adapter.py_dataset, _Unread(self._adapter.num_batches)
        try:
            for _ in range(count):
                next(batches)
        finally:
            self._adapter.py_dataset = dataset
        self.users.set_state(state)
        return batches


class _Unread(keras.utils.PyDataset):
    """A stand-in for a dataset: so many batches, and nothing in them."""

    def __init__(self, count: int | None):
        super().__init__()
        self._count = count

    @property
    def num_batches(self) -> int | None:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


class _Grain(Source):
    can_say = True

    def _state(self, batches: Any) -> Any:
        return batches.get_state()

    def _continued(self, state: Any, count: int) -> Iterator[Any]:
        batches: Any = iter(self.users)
        batches.set_state(state)
        return batches

    def dataset(self) -> Any:
        """The dataset that Keras reads in its place: one of grain, because Keras appends transformations."""
        grain, source = sys.modules["grain"], self

        class Kept(grain.IterDataset):
            def __iter__(self) -> Any:
                return KeptIterator()

        class KeptIterator(grain.DatasetIterator):
            def __init__(self) -> None:
                super().__init__()
                self._batches = source.batches(iter(source.users))

            def __next__(self) -> Any:
                return next(self._batches)

            def get_state(self) -> dict[str, Any]:
                raise NotImplementedError("the states are kept by keras_flow")

            def set_state(self, state: dict[str, Any]) -> None:
                raise NotImplementedError("the states are kept by keras_flow")

        return Kept()


class _Loader(Source):
    """A DataLoader, which remembers the states of its own generator and its sampler's between two epochs."""

    def between(self) -> Any:
        return encoded([generator.get_state() for generator in self._generators()])

    def set_between(self, state: Any) -> None:
        for generator, each in zip(self._generators(), decoded(state), strict=True):
            generator.set_state(each)

    def _generators(self) -> list[Any]:
        given = (self.users.generator, getattr(self.users.sampler, "generator", None))
        return list({id(each): each for each in given if each is not None}.values())


class _StatefulLoader(_Loader):
    can_say = True

    def _state(self, batches: Iterator[Any]) -> Any:
        return {"loader": self.users.state_dict(), "generators": self.between()}

    def _continued(self, state: Any, count: int) -> Iterator[Any]:
        self.users.load_state_dict(state["loader"])
        batches = iter(self.users)
        self.set_between(state["generators"])  # beginning draws from them
        return batches


class _KeptLoader:
    """Stands for a StatefulDataLoader in Keras's adapter."""

    def __init__(self, source: _StatefulLoader):
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        # begun here, as Keras begins it: a loader takes a number from its generator then. One that goes on has begun
        return self._source.batches(iter(()) if self._source.goes_on else iter(self._source.users))

    def __len__(self) -> int:
        return len(self._source.users)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source.users, name)


@hook("keras:adapters", "get_data_adapter", "kf.callbacks.Checkpoint: data say where they are", when=always)
def adapted(_: object, original: Callable[..., Any], x: Any, *args: object, **kwargs: object) -> Any:
    """Hook on `get_data_adapter`: the adapter has a source, which knows where it is."""
    if _is_a(x, "grain", "MapDataset", "IterDataset", "DataLoader"):
        source: Source = _Grain(x)
        adapter = original(source.dataset(), *args, **kwargs)  # type: ignore[attr-defined]
    else:
        adapter = original(x, *args, **kwargs)
        if hasattr(adapter, _ATTRIBUTE):  # an adapter of the user's, read before
            return adapter
        source = _source(x, adapter)
    setattr(adapter, _ATTRIBUTE, source)
    return adapter


def _source(x: Any, adapter: Any) -> Source:
    if isinstance(x, keras.utils.PyDataset):
        users = x.users if isinstance(x, OwnRowsPyDataset) else x
        # workers read copies, as far ahead as they come
        is_one = adapter.enqueuer is None and hasattr(users, "get_state") and hasattr(users, "set_state")
        return _PyDataset(users, adapter) if is_one else Source(users)
    if _is_a(x, "torch.utils.data", "DataLoader"):
        if not hasattr(x, "load_state_dict"):
            return _Loader(x)
        source = _StatefulLoader(x)
        adapter._dataloader = _KeptLoader(source)
        return source
    return Source(x)


def _is_a(x: object, module: str, *names: str) -> bool:
    """Whether a class of a package is among those of a value; the package need not be loaded."""
    return any(kind.__name__ in names and f"{kind.__module__}.".startswith(f"{module}.") for kind in type(x).__mro__)


def source_of(adapter: Any) -> Source:
    """The source of Keras's adapter."""
    return getattr(adapter, _ATTRIBUTE, None) or Source(None)


def count() -> int:
    """A number above those of all sources that there are."""
    return next(_numbers)
