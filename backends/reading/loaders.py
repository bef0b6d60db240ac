"""torch's `DataLoader`s on every engine: a process fetches and transforms its own samples only, by as many workers.

A loader is cut at its batch sampler. Two kinds are read whole, because parts of a batch would not be those of one
device: those with a `collate_fn`, or a dataset's `__getitems__`, of the user's own (it may pad to the longest sample of
the batch), and those whose dataset draws from random generators, global ones or its own (every sample moves them on).
The second is found as the first batches are read, which are whole; a dataset that draws later on is refused.
"""

from __future__ import annotations

import itertools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from keras import tree

from keras_flow.backends.reading.process_rows import ProcessRows, ReadingEngine, say_whole
from keras_flow.current.keras_places import data_adapter_utils
from keras_flow.errors import FlowError

#: in the place of batches: all rows are read, as Keras does it
WHOLE = object()
#: how deep generators are looked for among what a dataset holds, how many items of a sequence and things in all
_DEPTH, _ITEMS, _THINGS = 6, 32, 400


def batches(stock: Any, part: ProcessRows, engine: ReadingEngine) -> Any:
    """The batches of a user's loader, of which this process reads its rows; `WHOLE` where it cannot.

    Raises:
        FlowError: the loader's sampler leaves each process other samples.
    """
    if _leaves_samples_to_ranks(stock):
        raise FlowError(
            "the DataLoader has a DistributedSampler, which gives each rank samples of its own, and a batch under "
            "keras_flow is the logical one of all ranks: leave the sampler out (shuffle=True stays), and give "
            "batch_size for all ranks together. Each rank still fetches its own samples only"
        )
    if why := _why_whole(stock):
        say_whole("the DataLoader", why, part.word)
        return WHOLE
    if engine.makes_tf_data:
        _begin(stock)
    return OwnRowsLoader(stock, part, engine)


def _torch_data() -> Any:
    return sys.modules["torch.utils.data"]  # there, because the user made a loader of it; torch may not be the engine


def _leaves_samples_to_ranks(stock: Any) -> bool:
    kind = _torch_data().distributed.DistributedSampler
    return isinstance(stock.sampler, kind) or isinstance(getattr(stock.batch_sampler, "sampler", None), kind)


def _why_whole(stock: Any) -> str:
    """Why a process cannot fetch its part of a loader's batches; empty where it can."""
    if isinstance(stock.dataset, _torch_data().IterableDataset):
        return "its dataset is an IterableDataset, which has no samples by index"
    if type(stock).__iter__ is not _torch_data().DataLoader.__iter__:
        return "its class iterates in a way of its own"
    if stock.batch_sampler is None:
        return "batch_size=None leaves the batches to its dataset"
    if hasattr(stock, "load_state_dict"):
        return "it keeps its own position, as torchdata's StatefulDataLoader does, in the samples that it reads itself"
    if stock.collate_fn is not _torch_data().default_collate:
        return "its collate_fn is not torch's, and may make a sample depend on the others of its batch (padding)"
    if name := _makes_batches(stock.dataset):
        return f"__getitems__ of {name} is not torch's, and may make a sample depend on the others of its batch"
    return ""


def _makes_batches(dataset: Any) -> str:
    """The class of the dataset whose own `__getitems__` makes the samples of a batch together; empty where none has."""
    kind = type(dataset)
    if not callable(getattr(dataset, "__getitems__", None)):
        return ""
    if not kind.__module__.startswith("torch."):
        return kind.__name__
    inside = dataset.dataset if hasattr(dataset, "dataset") else dataset.datasets  # Subset, StackDataset
    return next(filter(None, map(_makes_batches, tree.flatten(inside))), "")


def _begin(stock: Any) -> None:
    """Begin a loader, and fetch nothing: its generator goes on as where Keras looks at its first batches."""
    loader = _torch_data().DataLoader(
        range(len(stock.dataset)), batch_sampler=stock.batch_sampler, generator=stock.generator
    )
    list(itertools.islice(loader, data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC))


class OwnBatches:
    """A batch sampler that leaves this process its own samples of each batch, and those that all fetch to compare.

    Args:
        batches: the batch sampler of the logical batches.
        part: which rows this process reads.
        engine: knows how many batches were seen.
        first_whole: so many batches are read whole at first.
    """

    def __init__(self, batches: Any, part: ProcessRows, engine: ReadingEngine, first_whole: int):
        self.batches, self.part, self.engine, self.first_whole = batches, part, engine, first_whole
        #: whether all batches are read whole from now on
        self.stays_whole = False
        #: number and rows of each batch that was asked for and has not arrived; None for one that is read whole
        self.expected: deque[tuple[int, int] | None] = deque()

    def __iter__(self) -> Iterator[list]:
        self.expected.clear()
        # workers ask for batches ahead of the steps that see them
        seen = self.engine.seen()
        for at, batch in enumerate(self.batches):
            samples, number = list(batch), seen + at
            if at < self.first_whole or self.stays_whole:
                self.expected.append(None)
                yield samples
            else:
                self.expected.append((number, len(samples)))
                yield [samples[index] for index in self.part.indices(number, len(samples))]

    def __len__(self) -> int:
        return len(self.batches)


class OwnRowsLoader:
    """The batches of a DataLoader, of which this process fetches its samples.

    Args:
        stock: the user's loader.
        part: which rows this process reads.
        engine: how they become values of a batch.
    """

    def __init__(self, stock: Any, part: ProcessRows, engine: ReadingEngine):
        # a worker asks for batches ahead: until the first has arrived it is not known whether samples draw
        ahead = stock.num_workers * (stock.prefetch_factor or 0)
        self.batches = OwnBatches(stock.batch_sampler, part, engine, 1 + ahead)
        self.part, self.engine = part, engine
        self.loader = _torch_data().DataLoader(
            _WatchedDataset(stock.dataset),
            batch_sampler=self.batches,
            num_workers=stock.num_workers,
            collate_fn=_collate_with_draws,
            pin_memory=stock.pin_memory,
            timeout=stock.timeout,
            worker_init_fn=stock.worker_init_fn,
            multiprocessing_context=stock.multiprocessing_context,
            generator=stock.generator,
            prefetch_factor=stock.prefetch_factor,
            persistent_workers=stock.persistent_workers,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # on torch begun here and not with the first batch: a loader that begins takes a number from its generator, and
        # Keras begins twice for each epoch. Within a tf.data.Dataset one begins with the first batch
        return self._parts(None if self.engine.makes_tf_data else iter(self.loader))

    def _parts(self, begun: Iterator[tuple[Any, bool]] | None) -> Iterator[Any]:
        for batch, draws in begun or self.loader:
            expected = self.batches.expected.popleft()
            # whole batches have the same samples in all processes, so that all come to the same answer
            if expected is None and not draws:
                self.batches.first_whole = 0  # of the epochs that follow
            if expected is not None and draws:
                raise FlowError(
                    f"the dataset of the DataLoader drew from a random generator in batch {expected[0]}, and not in "
                    "the first one: ranks read their own rows, so that each would draw other numbers, and shuffle "
                    "another order. Draw from a generator made for the sample and seeded by its index, or give the "
                    "loader a collate_fn of your own (lambda samples: default_collate(samples)): then every rank reads "
                    "whole batches"
                )
            if draws and not self.batches.stays_whole:
                self.batches.stays_whole = True
                say_whole(
                    "the DataLoader",
                    "its dataset draws from a random generator, which every sample moves on (draw from one made for "
                    "the sample and seeded by its index, and ranks can read their own rows)",
                    self.part.word,
                )
            # torch collates a sample's tuple to a list, which Keras takes for a list of inputs
            batch = tuple(batch) if isinstance(batch, list) else batch
            values = tree.map_structure(self.engine.from_host, batch, none_is_leaf=False)
            yield values if expected is None else self.part.divided(values, *expected)


class _WatchedDataset:
    """A dataset that says whether the samples of a batch drew from a random generator; used in workers too."""

    dataset: Any

    def __init__(self, dataset: Any):
        # not by `setattr`, which goes to the dataset
        vars(self)["dataset"] = dataset

    # a worker's `worker_init_fn` sees this one in the place of the user's

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # before it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> tuple[list[Any], bool]:
        """Torch asks for the samples of a batch by this method."""
        before = [*_global_states(), *_own_states(self.dataset)]
        of_all = getattr(self.dataset, "__getitems__", None)
        samples: Any = of_all(indices) if callable(of_all) else [self.dataset[index] for index in indices]
        return samples, [*_global_states(), *_own_states(self.dataset)] != before

    def __len__(self) -> int:
        return len(self.dataset)


def _global_states() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    torch_state = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return random.getstate(), (name, keys.tobytes(), *rest), torch_state  # type: ignore[union-attr]


def _own_states(dataset: Any) -> Iterator[object]:
    """The states of generators that a dataset and its transforms hold, or that its `__getitem__` knows by name."""
    code = getattr(type(dataset).__getitem__, "__code__", None)
    known = type(dataset).__getitem__.__globals__ if code else {}
    held: list[Any] = [dataset, dict(vars(type(dataset))), [known.get(name) for name in code.co_names] if code else ()]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        held, around = [], held
        for thing in around:
            if id(thing) in seen or isinstance(thing, ModuleType | type) or len(seen) > _THINGS:
                continue
            seen.add(id(thing))
            if (state := _state(thing)) is not None:
                yield state
            elif isinstance(thing, Mapping):
                held += itertools.islice(thing.values(), _ITEMS)
            elif isinstance(thing, Sequence) and not isinstance(thing, str | bytes):
                held += thing[:_ITEMS]
            else:
                held += getattr(thing, "__dict__", {}).values()


def _state(thing: Any) -> object:
    """The state of a random generator; None for anything else."""
    torch, keras = sys.modules["torch"], sys.modules["keras"]
    if isinstance(thing, np.random.Generator | np.random.RandomState | random.Random):
        # the system's own has no state, and is another in each process anyway
        return None if isinstance(thing, random.SystemRandom) else pickle.dumps(thing)
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if isinstance(thing, keras.random.SeedGenerator):
        # a forked process must not ask an engine that has threads: there it counts as one that draws
        return object() if _torch_data().get_worker_info() else np.asarray(thing.state).tobytes()
    return None


def _collate_with_draws(found: tuple[list[Any], bool]) -> tuple[Any, bool]:
    samples, drew = found
    return _torch_data().default_collate(samples), drew
