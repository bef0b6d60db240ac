"""`random="logical"`: the order of rows in `fit` is a function of seed, epoch and position, on every engine.

The seed is that of `keras.utils.set_random_seed`; without one process 0 draws one for each `fit`. An epoch that is
begun again under one seed (`fit` is called in a loop) has another order, and a program that goes on in its third epoch
has the order of that epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from keras_flow.backends import logical_random
from keras_flow.backends.active import backend
from keras_flow.backends.object_hooks import replaces
from keras_flow.backends.rendezvous import agreement
from keras_flow.current.distribution import active
from keras_flow.current.keras_places import GLOBAL_RANDOM_SEED, get_random_seed, set_global_attribute
from keras_flow.permutation import Permutation

#: positions that are evaluated at a time, in whole batches: NumPy takes as long for a few
_GROUP = 1024

#: a `fit` runs whose rows are ordered here; a name of the module, because TensorFlow reads data in threads of its own
_is_ordering = False
#: epoch of the `fit` that runs, and its seed; None before its first epoch
_epoch: int | None = None
_seed = 0
#: epoch -> how often it was begun under the seed
_begun: dict[int, int] = {}


class _Counted(int):
    """The seed of `set_random_seed` once epochs are counted under it: the next call puts a plain number in its place.

    Keras's own generator is dropped by that call, too. But making one where one device makes none draws a number from
    Python's `random`, and layers made after a `fit` would begin with other weights.
    """


def shuffles(adapter: Any) -> bool:
    """Whether the rows, or the batches, of Keras's adapter of arrays are shuffled by logical position."""
    return bool(_is_ordering and adapter._shuffle)


def by_position(*args: object, **kwargs: object) -> bool | None:
    """Condition of the hook on the beginning of epochs: rows are ordered by logical position."""
    return True if _is_ordering else None


class EpochOrder:
    """The order of the epoch that runs.

    Args:
        rows: how many rows there are.
        batch_size: rows of a batch.
        within_batches: rows are shuffled within their batches, which stay in order (`shuffle="batch"`).
    """

    def __init__(self, rows: int, batch_size: int, within_batches: bool = False):
        self.rows, self.batch_size, self.within_batches = rows, batch_size, within_batches
        self.seed, self.stream = _of_epoch()
        self._permutation = Permutation(rows, self.seed, self.stream)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The rows at some positions; with `within_batches` all positions of one batch."""
        if not self.within_batches:
            return self._permutation.rows(positions)
        first = int(positions[0])
        # the streams of an epoch's batches differ in what its own number leaves free
        stream = self.stream + (1 + first // self.batch_size << 40) & 0xFFFFFFFFFFFFFFFF
        return first + Permutation(len(positions), self.seed, stream).rows(positions - first)


def batches(adapter: Any) -> Iterator[np.ndarray]:
    """The rows of each batch of Keras's adapter of arrays; what is shuffled is chosen with the first one."""
    rows, size = adapter._num_samples, adapter._batch_size
    order = EpochOrder(rows, size, adapter._shuffle == "batch")
    together = size if order.within_batches else size * max(1, _GROUP // size)
    for start in range(0, rows, together):
        found = order.at(np.arange(start, min(start + together, rows)))
        yield from (found[first : first + size] for first in range(0, len(found), size))


def batches_of_dataset(adapter: Any) -> Iterator[object]:
    """The batches of Keras's adapter of a PyDataset, in the order of the epoch.

    Keras shuffles their numbers by Python's generator, which engines have moved on differently.
    """
    order = EpochOrder(adapter.py_dataset.num_batches, 1)
    for number in order.at(np.arange(order.rows)):
        yield adapter._standardize_batch(adapter.py_dataset[int(number)])


def dataset_shuffles(adapter: Any) -> bool:
    """Whether the batches of Keras's adapter of a PyDataset are shuffled so."""
    return bool(_is_ordering and adapter.shuffle)


@contextmanager
def ordering() -> Iterator[None]:
    """Inside, a `fit` runs. What Keras reads before its first epoch, to learn of shapes, is of no epoch."""
    global _is_ordering, _epoch, _seed
    was_ordering, epoch, seed = _is_ordering, _epoch, _seed
    _is_ordering, _epoch = logical_random.is_logical(), None
    try:
        yield
    finally:
        _is_ordering, _epoch = was_ordering, epoch
        if epoch is not None:  # a callback's `fit` has ended, and the outer one goes on by its own seed
            _seed = seed


@replaces("keras.callbacks.CallbackList", "on_epoch_begin", when=by_position)
def epoch_begins(_: object, original: Callable[..., object], callbacks: object, epoch: int, logs: Any = None) -> object:
    """Hook on `CallbackList.on_epoch_begin`: the order of rows is that of this epoch."""
    global _seed
    if _epoch is None:
        _seed = _seed_of_fit()
    begin(int(epoch))
    return original(callbacks, epoch, logs)


def begin(epoch: int) -> None:
    """Begin an epoch, and count it: the order of rows is that of this epoch."""
    global _epoch
    _epoch = epoch
    # counted here and not as an iterator begins: Keras makes some that nobody reads, and TensorFlow's read in threads,
    # as late as in the next epoch
    _begun[epoch] = _begun.get(epoch, -1) + 1


def _of_epoch() -> tuple[int, int]:
    """Seed and stream of the epoch that runs."""
    if _epoch is None:
        return 0, 0
    return _seed, (_epoch & 0xFFFFFF) | (_begun.get(_epoch, 0) & 0xFFFF) << 24


def _seed_of_fit() -> int:
    seed = get_random_seed()
    if seed is None:
        _begun.clear()
        drawn = int(np.random.randint(2**63))
        several = active() is not None and backend().world().process_count > 1
        return int(agreement.first_says(str(drawn))) if several else drawn
    if not isinstance(seed, _Counted):
        _begun.clear()
        set_global_attribute(GLOBAL_RANDOM_SEED, _Counted(seed))
    return int(seed) & 0xFFFFFFFFFFFFFFFF


def state() -> dict[str, Any]:
    """Return the state from which the orders of this epoch and of coming ones follow, fit for JSON."""
    return {"seed": _seed, "epoch": _epoch, "begun": sorted(_begun.items())}


def set_state(state: Mapping[str, Any]) -> None:
    """Order this epoch and coming ones as they would have been when `state` was called."""
    global _epoch, _seed
    _seed, _epoch = state["seed"], state.get("epoch", _epoch)
    _begun.clear()
    _begun.update((epoch, times) for epoch, times in state["begun"])
    seed = get_random_seed()
    if seed is not None:
        set_global_attribute(GLOBAL_RANDOM_SEED, _Counted(seed))
