"""Data that several processes read: each reads the rows of a batch that its ranks compute, no others.

The order of the logical batches is Keras's or the source's own, drawn alike in all processes. What an engine needs is
the same for each: `ProcessRows` says which rows a process reads, and a value of a batch of which it read its rows is a
`PartOfRows`, which has the logical shape. Arrays are read here; see `py_datasets`, `loaders` and `tf_data` for other
sources.

Example: a batch of the rows 5, 0, 3 and 6 in 2 processes. Process 1 reads rows 3 and 6, which are rows 2 and 3 of the
batch.

Of the few batches that `batch_watch` compares, a process also reads the rows of the next process. So two processes read
each row, and different data are found without anybody reading a whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from keras import tree

from keras_flow.backends import leaves
from keras_flow.backends.reading.batch_watch import PartOfRows, is_compared
from keras_flow.current.keras_places import array_slicing
from keras_flow.errors import warn
from keras_flow.layout import balanced

#: sources of data, and the reasons, of which it was said that they are read whole
_said: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class ProcessRows:
    """Which rows of its batches a process reads; pickled for workers that read.

    >>> part = ProcessRows(blocks=4, first=1, last=1, uneven="balanced")
    >>> part.own(8), part.own(6), part.own(3)
    (slice(2, 4, None), slice(2, 4, None), slice(0, 3, None))

    Attributes:
        blocks: into so many blocks of rows a batch is split.
        first: the first block that a rank of this process computes.
        last: the last one; of those between all are read.
        uneven: the blocks of a batch that does not divide: `"balanced"` by the balanced split, `"padded"` of ceil(rows
            / blocks) rows, `"whole"` all rows for everyone.
        word: what a process is called in messages, `"rank"` where each has one.
    """

    blocks: int
    first: int
    last: int
    uneven: Literal["balanced", "padded", "whole"]
    word: str = "rank"

    def own(self, rows: int) -> slice:
        """The rows of a batch of so many that this process reads; all where there are fewer than blocks."""
        if rows < self.blocks or (rows % self.blocks and self.uneven == "whole"):
            return slice(0, rows)
        if self.uneven == "balanced":
            return slice(balanced(rows, self.blocks, self.first)[0], balanced(rows, self.blocks, self.last)[1])
        size = -(-rows // self.blocks)
        # of the padded split the last blocks may be empty, and a source may not be able to read no row
        start = min(self.first * size, rows - 1)
        return slice(start, max(start + 1, min((self.last + 1) * size, rows)))

    def compared(self, number: int, rows: int) -> slice:
        """The rows of the next process, where the batch of this number is to be compared; else none."""
        own, width = self.own(rows), self.last - self.first + 1
        # read whole, it is compared whole
        if own == slice(0, rows) or not is_compared(number):
            return slice(0, 0)
        following = (self.last + 1) % self.blocks
        return replace(self, first=following, last=min(following + width, self.blocks) - 1).own(rows)

    def indices(self, number: int, rows: int) -> np.ndarray:
        """Both together [own + compared]: what a source is asked for that gives rows by their numbers."""
        own, compared = self.own(rows), self.compared(number, rows)
        return np.concatenate([np.arange(own.start, own.stop), np.arange(compared.start, compared.stop)])

    def divided(self, batch: object, number: int, rows: int) -> object:
        """The batch as a structure of logical values, from what was read of its `indices`."""
        own, compared = self.own(rows), self.compared(number, rows)
        count = own.stop - own.start
        others = tree.map_structure(lambda leaf: leaf[count:], batch, none_is_leaf=False)
        mine = tree.map_structure(lambda leaf: leaf[:count], batch, none_is_leaf=False)
        return self.joined(mine, others if compared.stop > compared.start else None, number, rows)

    def read(self, read: Callable[[slice], object], number: int, rows: int) -> object:
        """Return the batch, read from a source that reads slices."""
        compared = self.compared(number, rows)
        others = read(compared) if compared.stop > compared.start else None
        return self.joined(read(self.own(rows)), others, number, rows)

    def joined(self, own: object, compared: object, number: int, rows: int) -> object:
        """Return the batch, made of the own rows and of those to compare (None: there are none)."""
        chosen, others = self.own(rows), self.compared(number, rows)
        if chosen == slice(0, rows):
            return own

        def one(leaf: Any, other: Any = None) -> PartOfRows:
            return PartOfRows(leaf, other, rows, chosen.start, others.start, number)

        if compared is None:
            return leaves.mapped(one, own, none_is_leaf=False)
        return tree.map_structure(one, own, compared, none_is_leaf=False)


@dataclass(frozen=True)
class ReadingEngine:
    """The part of an engine that reading uses.

    Attributes:
        arrays: Keras's name of the engine for arrays that are sliced.
        from_sliced: (sliceable, what was sliced of it) -> a value of a batch.
        from_host: a value that a user's dataset gave -> a value of a batch.
        seen: batches that the running loop has seen.
        makes_tf_data: whether Keras makes a `tf.data.Dataset` of every source. Then loops begin at other times, which
            moves the generators of shuffles on.
        begins: called where a loop begins and Keras would begin a DataLoader: that takes a number from torch's
            generator, from which layers without a seed draw.
    """

    arrays: str
    from_sliced: Callable[[Any, Any], Any]
    from_host: Callable[[Any], Any]
    seen: Callable[[], int] = lambda: 0
    makes_tf_data: bool = False
    begins: Callable[[], object] = lambda: None


class ArrayBatches:
    """Batches of arrays and memory maps, of which this process reads its rows.

    Args:
        adapter: Keras's adapter of the arrays.
        original: Keras's method that gives an adapter's batches; here it shuffles the numbers of the rows.
        part: which rows this process reads.
        engine: how they become values of a batch.
    """

    def __init__(self, adapter: Any, original: Callable[[Any], Iterable], part: ProcessRows, engine: ReadingEngine):
        numbers = copy.copy(adapter)
        numbers._inputs = (np.arange(adapter._num_samples),)
        self.order = original(numbers)
        self.is_shuffled = bool(adapter._shuffle)
        self.inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend=engine.arrays)
        self.part, self.engine = part, engine

    def __iter__(self) -> Iterator[object]:
        # begun here and not with the first batch: a DataLoader that begins takes a number from its generator, and Keras
        # begins twice for each epoch
        return self._parts(iter(self.order))

    def _parts(self, order: Iterator) -> Iterator[object]:
        for number, (numbers,) in enumerate(order, self.engine.seen()):
            rows = np.asarray(numbers)
            yield self.part.read(lambda chosen, rows=rows: self._read(rows[chosen]), number, len(rows))

    def _read(self, rows: np.ndarray) -> object:
        # a slice of a memory map is read in one go
        where = rows if self.is_shuffled or not len(rows) else slice(int(rows[0]), int(rows[-1]) + 1)
        return leaves.mapped(
            lambda array: self.engine.from_sliced(array, array[where]), self.inputs, none_is_leaf=False
        )


def one_ahead(iterator: Iterator[object]) -> Iterator[object]:
    """Yield the batches; while one is used, a thread reads the next.

    Nobody waits for this thread where a loop is left before its end. The garbage collector may be who leaves it, in any
    thread, such as one that is beginning and holds what the other needs to end.
    """
    end, thread = object(), ThreadPoolExecutor(1, "keras_flow-reading")
    try:
        following = thread.submit(next, iterator, end)
        while (batch := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield batch
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def say_whole(source: str, why: str, word: str) -> None:
    """Say once that every process reads whole batches of a source of data.

    Args:
        source: what the data are.
        why: why a part cannot be read.
        word: what a process is called.
    """
    if (source, why) in _said:
        return
    _said.add((source, why))
    warn(f"every {word} reads whole batches of {source} and keeps its rows: {why}. The numbers are the same")
