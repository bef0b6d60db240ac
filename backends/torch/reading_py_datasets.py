"""A user's `PyDataset` on PyTorch, of whose batches a rank reads its own rows where the dataset can read a part.

A dataset says that it can by a method `rows(index, part)`: the rows of batch `index` that `part` chooses, where
`part(n)` is a slice of the `n` rows of the batch (docs/data.md has an example).

Example: a batch of 32 rows on 4 ranks. On rank 1 `part(32)` is `slice(8, 16)`.

The first batches, and then every hundredth, are read whole, so that ranks that are fed different data are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src import tree
from keras.src.backend.torch import core

from keras_flow.backends.batch_watch import is_compared
from keras_flow.backends.torch import layouts, mirrored, split_rows
from keras_flow.backends.torch.reading import say_whole
from keras_flow.current.distribution import Distribution
from keras_flow.errors import FlowError
from keras_flow.layout import balanced
from keras_flow.placements import Placement


class PartOfBatch:
    """The rows of a batch that a rank reads, for `rows(index, part)`.

    Args:
        count: ranks that share the rows.
        index: which of them this is.
    """

    def __init__(self, count: int, index: int):
        self.count, self.index = count, index
        #: rows of the batch; known when the dataset has asked
        self.rows: int | None = None

    def __call__(self, rows: int) -> slice:
        """This rank's slice of so many rows; all of them where there are fewer than ranks."""
        self.rows = rows
        return slice(*balanced(rows, self.count, self.index)) if rows >= self.count else slice(0, rows)


class OwnRowsPyDataset(keras.utils.PyDataset):
    """The batches of a user's dataset, of which this rank reads its rows. Used in worker processes too.

    Args:
        users: the dataset, which has a method `rows`.
        placement: the ranks that share the rows.
    """

    def __init__(self, users: Any, placement: Placement):
        super().__init__(users.workers, users.use_multiprocessing, users.max_queue_size)
        self.users = users
        self.count, self.index = len(placement.ranks), placement.ranks.index(layouts.this_rank())

    @property
    def num_batches(self) -> int | None:
        """As the user's dataset says."""
        return self.users.num_batches

    def __getitem__(self, index: int) -> dict[str, object]:
        """A batch or its part, with the number of its rows (None: it is whole). Keras leaves a dict as it is."""
        if is_compared(index):
            return {"index": index, "rows": None, "batch": self.users[index]}
        part = PartOfBatch(self.count, self.index)
        batch = self.users.rows(index, part)
        name = type(self.users).__name__
        if part.rows is None:
            raise FlowError(f"{name}.rows(index, part) did not ask which rows: call part(n) with the batch's n rows")
        own = part(part.rows)
        wanted = own.stop - own.start
        for leaf in tree.flatten(batch):
            if hasattr(leaf, "shape") and tuple(leaf.shape[:1]) != (wanted,):
                raise FlowError(
                    f"{name}.rows({index}, part) returned an array of shape {list(leaf.shape)}, where part({part.rows})"
                    f" chooses {wanted} rows"
                )
        return {"index": index, "rows": None if part.rows < self.count else part.rows, "batch": batch}

    def on_epoch_begin(self) -> None:
        """As the user's dataset does."""
        self.users.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """As the user's dataset does."""
        self.users.on_epoch_end()


def adapter(
    distribution: Distribution, original: Callable[..., None], self: Any, x: Any, *args: object, **kwargs: object
) -> None:
    """Hook on `PyDatasetAdapter.__init__`: put between Keras and a dataset that can read parts of batches."""
    if callable(getattr(x, "rows", None)):
        x = OwnRowsPyDataset(x, distribution.placement)
    else:
        say_whole(
            f"the PyDataset {type(x).__name__}",
            "it has no method rows(index, part) that reads a part of a batch (keras_flow documents it in docs/data.md)",
        )
    original(self, x, *args, **kwargs)


def loader(distribution: Distribution, original: Callable[..., Any], self: Any) -> Any:
    """Hook on `PyDatasetAdapter.get_torch_dataloader`: batches as tensors, logical ones where a rank has its rows."""
    if not isinstance(self.py_dataset, OwnRowsPyDataset):
        return original(self)
    return _Batches(self, distribution.placement)


class _Batches:
    """What Keras iterates over: a loop over the batches of an adapter."""

    def __init__(self, adapter: Any, placement: Placement):
        self.adapter, self.placement = adapter, placement

    def __iter__(self) -> Iterator[object]:
        for item in self.adapter._get_iterator():
            # class weights are given to the rows that were read
            batch = self.adapter._standardize_batch(item["batch"])
            batch = tree.map_structure(core.convert_to_tensor, batch, none_is_leaf=False)
            if item["rows"] is None:
                yield batch
                continue
            rows = mirrored.rows_of(self.placement, item["rows"])
            origin = 1 + item["index"]
            yield tree.map_structure(
                lambda leaf, rows=rows, origin=origin: split_rows.split(leaf, rows, origin), batch, none_is_leaf=False
            )
