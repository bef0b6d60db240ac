"""Batches on PyTorch that a rank reads by its own rows: logical tensors of which it holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keras_flow.backends import leaves
from keras_flow.backends.reading import row_order, sources
from keras_flow.backends.reading.batch_watch import PartOfRows
from keras_flow.backends.reading.process_rows import ProcessRows, ReadingEngine
from keras_flow.backends.torch import data, layouts
from keras_flow.backends.torch.rows import mirrored_calls, split_rows
from keras_flow.backends.torch.step import OwnRows
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.keras_places import engine_core as core


def part_of_batches(*args: object, **kwargs: object) -> ProcessRows | None:
    """The rows that this rank reads, where ranks share those of a batch."""
    distribution = active()
    if distribution is None or not layouts.distributed(distribution.placement):
        return None
    rows = _rows(distribution, distribution.num_model_replicas)
    if rows is None:
        return None
    uneven = "balanced" if distribution.mirrored_view else "whole"
    return ProcessRows(rows.count, rows.index, rows.index, uneven)


def _rows(distribution: Distribution, rows: int) -> OwnRows | None:
    """Which of so many rows this rank computes; None where all ranks compute all, or it is not known here."""
    if distribution.mirrored_view:
        return mirrored_calls.rows_of(distribution.placement, rows)
    # the ranks that have the other blocks are a line of the mesh only along one axis
    if len(distribution.batch_axes) != 1 or distribution.num_model_replicas == 1:
        return None
    (axis,) = distribution.batch_axes
    mesh = layouts.mesh(distribution.placement)
    return OwnRows(rows, mesh.size(mesh.mesh_dim_names.index(axis)), mesh.get_local_rank(axis), (mesh.get_group(axis),))  # type: ignore[union-attr]


class RowNumbers:
    """The row numbers of batches in the order of a loader, without the rest of what one does for each batch.

    Args:
        loader: a loader whose samples are the numbers of all rows.
    """

    def __init__(self, loader: torch.utils.data.DataLoader):
        self.batches, self.generator = loader.batch_sampler, loader.generator

    def __iter__(self) -> Iterator[tuple[list[int]]]:
        _begin(self.generator)
        return ((batch,) for batch in self.batches)  # type: ignore[union-attr]


def _begin(generator: torch.Generator | None = None) -> None:
    """Draw a number as a DataLoader that begins does: the base of its workers' seeds."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


class LogicalBatches:
    """Batches for Keras's loop, whose values are logical tensors.

    Args:
        batches: batches with parts of rows.
        distribution: its ranks share the rows.
    """

    def __init__(self, batches: Iterable, distribution: Distribution):
        self.batches, self.distribution = batches, distribution

    def __iter__(self) -> Iterator[object]:
        # begun here: see `keras_flow.backends.reading.process_rows.ArrayBatches`
        return self._logical(iter(self.batches))

    def _logical(self, batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            yield leaves.mapped(self._tensor, batch, none_is_leaf=False)

    def _tensor(self, leaf: object) -> object:
        if not isinstance(leaf, PartOfRows):
            return leaf
        rows = _rows(self.distribution, leaf.rows)
        return split_rows.split(leaf.own, rows, origin=leaf) if rows is not None else leaf


def loader(part: ProcessRows, whole: Callable[[Any], Any], adapter: object) -> Iterable:
    """Batches of which this rank reads its rows."""
    distribution = active()
    assert distribution is not None  # the condition found it

    def rows_or_stock(source: Any) -> Iterable:
        batches = whole(source)
        return RowNumbers(batches) if type(source).__name__ == "ArrayDataAdapter" else batches

    return LogicalBatches(sources.batches(part, _ENGINE, rows_or_stock, adapter), distribution)


class OrderedBatches:
    """A batch sampler: the numbers of the rows of each batch, in the order of the epoch that begins.

    Args:
        adapter: Keras's adapter of the arrays.
    """

    def __init__(self, adapter: Any):
        self.adapter = adapter

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in row_order.batches(self.adapter))

    def __len__(self) -> int:
        return self.adapter.num_batches


def ordered(original: Callable[[Any], Any], adapter: Any) -> torch.utils.data.DataLoader:
    """Batches of arrays in the order of the epoch."""
    stock = original(adapter)
    return torch.utils.data.DataLoader(
        stock.dataset, batch_sampler=OrderedBatches(adapter), collate_fn=stock.collate_fn
    )


def _from_sliced(array: Any, sliced: Any) -> torch.Tensor:
    batch = core.convert_to_tensor(array.convert_to_torch_compatible(sliced))
    # rows of the user's own tensor, which layers that write into their inputs would change
    return batch.clone() if batch._is_view() else batch


_ENGINE = ReadingEngine(
    "torch",
    from_sliced=_from_sliced,
    from_host=core.convert_to_tensor,
    seen=lambda: data.watch.seen,
    begins=_begin,
)

READER = sources.AdapterReader("get_torch_dataloader", part_of_batches, loader, ordered)
