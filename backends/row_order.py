"""`random="logical"`: the order of rows in `fit` is a function of seed, epoch and position, on every engine.

The seed is that of `keras.utils.set_random_seed`; without one process 0 draws one for each `fit`. An epoch that is
begun again under one seed (`fit` is called in a loop) has another order, and a program that goes on in its third epoch
has the order of that epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow.backends import agreement, logical_random
from keras_flow.backends.active import backend
from keras_flow.backends.hooking import Hook
from keras_flow.current.distribution import active
from keras_flow.permutation import Permutation

if TYPE_CHECKING:
    from keras.src.random.seed_generator import SeedGenerator

#: positions that are evaluated at a time, in whole batches: NumPy takes as long for a few
_GROUP = 1024

#: a `fit` runs whose rows are ordered here; a name of the module, because TensorFlow reads data in threads of its own
_is_ordering = False
#: epoch of the `fit` that runs, and its seed; None before its first epoch
_epoch: int | None = None
_seed = 0
#: epoch -> how often it was begun under the seed; and Keras's generator then, which `set_random_seed` drops
_begun: dict[int, int] = {}
_generator: SeedGenerator | None = None


def shuffles(adapter: Any, *args: object, **kwargs: object) -> bool | None:
    """Condition of the hooks on Keras's adapters: rows, or batches, are shuffled by logical position."""
    return True if _is_ordering and adapter._shuffle else None


def by_position(*args: object, **kwargs: object) -> bool | None:
    """Condition of the hook on the beginning of epochs: rows are ordered by logical position."""
    return True if _is_ordering else None


class EpochOrder:
    """The order of an epoch that begins.

    Args:
        rows: how many rows there are.
        batch_size: rows of a batch.
        within_batches: rows are shuffled within their batches, which stay in order (`shuffle="batch"`).
    """

    def __init__(self, rows: int, batch_size: int, within_batches: bool = False):
        self.rows, self.batch_size, self.within_batches = rows, batch_size, within_batches
        self.seed, self.stream = _begin()
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


def batches_of_dataset(_: object, original: Callable[..., Any], adapter: Any) -> Iterator[object]:
    """Hook on `PyDatasetAdapter._finite_generator`: its batches are in the order of the epoch.

    Keras shuffles their numbers by Python's generator, which engines have moved on differently.
    """
    order = EpochOrder(adapter.py_dataset.num_batches, 1)
    for number in order.at(np.arange(order.rows)):
        yield adapter._standardize_batch(adapter.py_dataset[int(number)])


def dataset_shuffles(adapter: Any) -> bool | None:
    """Condition of that hook."""
    return True if _is_ordering and adapter.shuffle else None


@contextmanager
def ordering() -> Iterator[None]:
    """Inside, a `fit` runs. What Keras reads before its first epoch, to learn of shapes, is of no epoch."""
    global _is_ordering, _epoch
    outer = _is_ordering, _epoch
    _is_ordering, _epoch = logical_random.is_logical(), None
    try:
        yield
    finally:
        _is_ordering, _epoch = outer


def epoch_begins(_: object, original: Callable[..., object], callbacks: object, epoch: int, logs: Any = None) -> object:
    """Hook on `CallbackList.on_epoch_begin`: the order of rows is that of this epoch."""
    global _epoch, _seed
    if _epoch is None:
        _seed = _seed_of_fit()
    _epoch = int(epoch)
    return original(callbacks, epoch, logs)


def _begin() -> tuple[int, int]:
    """Seed and stream of an epoch that begins."""
    if _epoch is None:
        return 0, 0
    times = _begun[_epoch] = _begun.get(_epoch, -1) + 1
    return _seed, (_epoch & 0xFFFFFF) | (times & 0xFFFF) << 24


def _seed_of_fit() -> int:
    from keras.src.random import seed_generator
    from keras.src.utils import rng_utils  # `keras.utils.get_random_seed` is no public name of Keras 3.13 to 3.15

    global _generator
    seed = rng_utils.get_random_seed() if hasattr(rng_utils, "get_random_seed") else None
    if seed is None:
        _begun.clear()
        drawn = int(np.random.randint(2**63))
        several = active() is not None and backend().world().process_count > 1
        return int(agreement.first_says(str(drawn))) if several else drawn
    # made once for each call of `set_random_seed`
    current = seed_generator.global_seed_generator()
    if current is not _generator:
        _begun.clear()
        _generator = current
    return int(seed) & 0xFFFFFFFFFFFFFFFF


def hooks(method: str, replacement: Callable[..., object]) -> tuple[Hook, ...]:
    """The hooks on sources of data.

    Args:
        method: of Keras's adapter of arrays, which gives its batches to the engine.
        replacement: called as `replacement(True, original, adapter)`, where these are shuffled.
    """
    adapters = "keras.src.trainers.data_adapters"
    return (
        Hook(
            f"{adapters}.array_data_adapter",
            f"ArrayDataAdapter.{method}",
            replacement,
            "rows are shuffled by seed, epoch and position; each engine has another order in Keras",
            when=shuffles,
        ),
        Hook(
            f"{adapters}.py_dataset_adapter",
            "PyDatasetAdapter._finite_generator",
            batches_of_dataset,
            "the batches of a PyDataset are shuffled so, too",
            when=dataset_shuffles,
        ),
        Hook(
            "keras.src.callbacks.callback_list",
            "CallbackList.on_epoch_begin",
            epoch_begins,
            "the order of rows is that of an epoch",
            when=by_position,
        ),
    )
