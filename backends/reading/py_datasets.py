"""A user's `PyDataset`, of whose batches a process reads its own rows where the dataset can read a part.

A dataset says that it can by a method `rows(index, part)`: the rows of batch `index` that `part` chooses, where
`part(n)` is a slice of the `n` rows of the batch (docs/data.md has an example).

Example: a batch of 32 rows in 4 processes. In process 1 `part(32)` is `slice(8, 16)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import tree

from keras_flow.backends.reading.process_rows import ProcessRows, ReadingEngine, say_whole
from keras_flow.errors import FlowError


class RowsOfBatch:
    """The `part` that a dataset's `rows(index, part)` is given: it chooses rows of the batch.

    Args:
        chosen: takes all rows of the batch; returns those that are wanted.
    """

    def __init__(self, chosen: Callable[[int], slice]):
        self.chosen = chosen
        #: rows of the batch; known when the dataset has asked
        self.rows: int | None = None

    def __call__(self, rows: int) -> slice:
        """The slice of so many rows that is wanted."""
        self.rows = rows
        return self.chosen(rows)


class OwnRowsPyDataset(keras.utils.PyDataset):
    """The batches of a user's dataset, of which this process reads its rows. Used in worker processes too.

    Args:
        users: the dataset, which has a method `rows`.
        part: which rows this process reads.
    """

    def __init__(self, users: Any, part: ProcessRows):
        super().__init__(users.workers, users.use_multiprocessing, users.max_queue_size)
        self.users, self.part = users, part

    @property
    def num_batches(self) -> int | None:
        """The number of batches that the user's dataset says."""
        return self.users.num_batches

    def __getitem__(self, index: int) -> dict[str, object]:
        """The own rows of a batch, and how many it has. Keras leaves a dict as it is."""
        rows, own = self._rows(index, self.part.own)
        return {"index": index, "rows": rows, "batch": own}

    def compared(self, index: int, rows: int, number: int) -> object:
        """The rows to compare of the batch `index`, which has so many; None where there are none.

        Args:
            index: which batch of the dataset it is.
            rows: how many it has; those of another batch may be others.
            number: which batch of the loop it is. Workers do not know that, and read no rows to compare.
        """
        compared = self.part.compared(number, rows)
        return self._rows(index, lambda rows: compared)[1] if compared.stop > compared.start else None

    def _rows(self, index: int, chosen: Callable[[int], slice]) -> tuple[int, object]:
        part = RowsOfBatch(chosen)
        batch = self.users.rows(index, part)
        name = type(self.users).__name__
        if part.rows is None:
            raise FlowError(f"{name}.rows(index, part) did not ask which rows: call part(n) with the batch's n rows")
        own = chosen(part.rows)
        wanted = own.stop - own.start
        for leaf in tree.flatten(batch):
            if hasattr(leaf, "shape") and tuple(leaf.shape[:1]) != (wanted,):
                raise FlowError(
                    f"{name}.rows({index}, part) returned an array of shape {list(leaf.shape)}, where part({part.rows})"
                    f" chooses {wanted} rows"
                )
        return part.rows, batch

    def on_epoch_begin(self) -> None:
        """Call the user's dataset."""
        self.users.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the user's dataset."""
        self.users.on_epoch_end()


def own_rows(dataset: Any, part: ProcessRows) -> Any:
    """Return what Keras reads in the place of a user's dataset: own rows alone, where it can read parts of batches."""
    if _reads_parts(dataset):
        return OwnRowsPyDataset(dataset, part)
    say_whole(
        f"the PyDataset {type(dataset).__name__}",
        "it has no method rows(index, part) that reads a part of a batch (keras_flow documents it in docs/data.md)",
        part.word,
    )
    return dataset


def _reads_parts(dataset: Any) -> bool:
    """Whether a dataset has `rows(index, part)`; a method of that name may have been there for another purpose."""
    try:
        inspect.signature(dataset.rows).bind(0, None)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


class PyDatasetBatches:
    """The batches of an adapter of `OwnRowsPyDataset`.

    Args:
        adapter: Keras's adapter.
        part: which rows this process reads.
        engine: how they become values of a batch.
    """

    def __init__(self, adapter: Any, part: ProcessRows, engine: ReadingEngine):
        self.adapter, self.part, self.engine = adapter, part, engine

    def __iter__(self) -> Iterator[object]:
        self.engine.begins()
        return self._parts()

    def _parts(self) -> Iterator[object]:
        for number, item in enumerate(self.adapter._get_iterator(), self.engine.seen()):
            index, rows, own = item["index"], item["rows"], self._values(item["batch"])
            compared = self.adapter.py_dataset.compared(index, rows, number)
            yield self.part.joined(own, None if compared is None else self._values(compared), number, rows)

    def _values(self, batch: object) -> object:
        # class weights are given to the rows that were read
        return tree.map_structure(self.engine.from_host, self.adapter._standardize_batch(batch), none_is_leaf=False)
