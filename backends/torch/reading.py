"""Arrays, memory maps and DataLoaders on PyTorch: a rank of data parallel reads the rows that it computes, no others.

The order of the logical batches is Keras's or the loader's own, drawn alike on all ranks; of each batch a rank takes
its block. Now and then, as `data.BatchWatch` says, it reads a whole batch, so that ranks which are fed different data
are found.

Example: a batch of the rows 5, 0, 3 and 6 on 2 ranks. Rank 1 reads rows 3 and 6, which are rows 2 and 3 of the batch.

A DataLoader is cut at its batch sampler, so that a rank fetches and transforms its own samples only, by as many workers
as before. Two kinds are read whole, because parts of a batch would not be those of one device: those whose `collate_fn`
is the user's own (it may pad to the longest sample of the batch), and those whose dataset draws from the global random
generators (every sample moves them on). The second is found as the first batches are read, which are whole.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from keras.src import tree
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from keras_flow.backends.torch import data, layouts, mirrored, split_rows
from keras_flow.current.distribution import Distribution, active
from keras_flow.errors import FlowError, FlowWarning
from keras_flow.placements import Placement

#: sources of data, and the reasons, of which it was said that they are read whole
_said: set[tuple[str, str]] = set()
#: samples of each process that are watched for random draws, since the comparison takes some microseconds
_WATCHED_SAMPLES = 256


class OwnRowsDataset(torch.utils.data.Dataset):
    """Batches of a dataset, of which this rank reads its rows.

    Args:
        whole: gives a batch for a list of indices (`__getitems__`).
        placement: the ranks that share the rows.
    """

    def __init__(self, whole: Any, placement: Placement):
        self.whole = whole
        self.placement = placement

    def __getitems__(self, indices: Sequence[int]) -> object:
        """The batch of these rows: logical tensors of which this rank holds its own."""
        # with fewer rows than ranks every rank computes all of them
        if data.watch.is_due() or len(indices) < len(self.placement.ranks):
            return self.whole.__getitems__(indices)
        rows = mirrored.rows_of(self.placement, len(indices))
        own = self.whole.__getitems__(indices[rows.own(len(indices))])
        return tree.map_structure(lambda leaf: split_rows.split(leaf, rows), own, none_is_leaf=False)


def distribution_of_rows(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on loaders of arrays: the active distribution, where ranks share the rows of a batch."""
    distribution = active()
    if distribution is None or not distribution.mirrored_view or not layouts.distributed(distribution.placement):
        return None
    return distribution


def loader(distribution: Distribution, original: Callable[..., Any], adapter: object) -> DataLoader:
    """Hook on `ArrayDataAdapter.get_torch_dataloader`: the same batches, of which this rank reads its rows."""
    stock = original(adapter)
    own = OwnRowsDataset(stock.dataset, distribution.placement)
    return DataLoader(own, batch_sampler=stock.batch_sampler, collate_fn=stock.collate_fn)


#: module and class of Keras's adapters of data of which a part cannot be asked for -> why
WHOLE_SOURCES = {
    ("generator_data_adapter", "GeneratorDataAdapter"): ("the generator", "it yields batches as they are"),
    ("tf_dataset_adapter", "TFDatasetAdapter"): ("the tf.data.Dataset", "its pipeline makes whole batches"),
    ("grain_dataset_adapter", "GrainDatasetAdapter"): ("the grain dataset", "its pipeline makes whole batches"),
}


def whole_source(
    _: Distribution, original: Callable[..., None], adapter: object, *args: object, **kwargs: object
) -> None:
    """Hook on adapters of data that every rank reads whole: say so."""
    kind = type(adapter)
    source, why = WHOLE_SOURCES[kind.__module__.rpartition(".")[2], kind.__name__]
    say_whole(source, f"{why} (a PyDataset with a method rows, a DataLoader, and arrays are read by own rows)")
    original(adapter, *args, **kwargs)


# ---- a user's DataLoader


def users_loader(distribution: Distribution, original: Callable[..., Any], adapter: Any) -> Any:
    """Hook on `TorchDataLoaderAdapter.get_torch_dataloader`: the user's batches, of which this rank reads its rows.

    Raises:
        FlowError: the loader's sampler leaves each rank other samples.
    """
    # asked for in each epoch: workers may stay, and are told once that a dataset draws
    if (made := getattr(adapter, "_keras_flow_loader", None)) is not None:
        return made
    stock = original(adapter)
    if isinstance(stock.sampler, DistributedSampler) or isinstance(
        getattr(stock.batch_sampler, "sampler", None), DistributedSampler
    ):
        raise FlowError(
            "the DataLoader has a DistributedSampler, which gives each rank samples of its own, and a batch under "
            "keras_flow is the logical one of all ranks: leave the sampler out (shuffle=True stays), and give "
            "batch_size for all ranks together. Each rank still fetches its own samples only"
        )
    why = _why_whole(stock)
    if why:
        say_whole("the DataLoader", why)
    adapter._keras_flow_loader = stock if why else OwnRowsLoader(stock, distribution.placement)
    return adapter._keras_flow_loader


def _why_whole(stock: DataLoader) -> str:
    """Why a rank cannot fetch its part of a loader's batches; empty where it can."""
    if isinstance(stock.dataset, IterableDataset):
        return "its dataset is an IterableDataset, which has no samples by index"
    if stock.batch_sampler is None:
        return "batch_size=None leaves the batches to its dataset"
    if stock.collate_fn is not default_collate:
        return "its collate_fn is not torch's, and may make a sample depend on the others of its batch (padding)"
    return ""


def say_whole(source: str, why: str) -> None:
    """Say once that every rank reads whole batches of a source of data."""
    if (source, why) in _said:
        return
    _said.add((source, why))
    warnings.warn(
        f"every rank reads whole batches of {source} and keeps its rows: {why}. The numbers are the same",
        FlowWarning,
        stacklevel=2,
    )


class OwnBatches:
    """A batch sampler that leaves this rank its own samples of each batch.

    Args:
        batches: the batch sampler of the logical batches.
        placement: the ranks that share the rows.
        first_whole: so many batches are read whole at first.
    """

    def __init__(self, batches: Any, placement: Placement, first_whole: int):
        self.batches, self.placement, self.first_whole = batches, placement, first_whole
        #: whether all batches are read whole from now on
        self.stays_whole = False
        #: rows of each batch that was asked for and has not arrived; None for one that is read whole
        self.expected: deque[int | None] = deque()

    def __iter__(self) -> Iterator[list]:
        self.expected.clear()
        # workers ask for batches ahead of the steps that see them
        seen = data.watch.seen
        for number, batch in enumerate(self.batches):
            indices = list(batch)
            # with fewer rows than ranks every rank computes all of them
            is_small = len(indices) < len(self.placement.ranks)
            whole = number < self.first_whole or is_small or data.watch.is_due(seen + number)
            if whole or self.stays_whole:
                self.expected.append(None)
                yield indices
            else:
                self.expected.append(len(indices))
                yield indices[mirrored.rows_of(self.placement, len(indices)).own(len(indices))]

    def __len__(self) -> int:
        return len(self.batches)


class OwnRowsLoader:
    """The batches of a DataLoader, of which this rank fetches its samples.

    Args:
        stock: the user's loader.
        placement: the ranks that share the rows.
    """

    def __init__(self, stock: DataLoader, placement: Placement):
        # a worker asks for batches ahead: until the first has arrived it is not known whether samples draw
        ahead = stock.num_workers * (stock.prefetch_factor or 0)
        self.batches = OwnBatches(stock.batch_sampler, placement, 1 + ahead)
        self.placement = placement
        self.loader = DataLoader(
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
        # begun here and not with the first batch: a loader that begins takes a number from its generator, and Keras
        # begins twice for each epoch
        return self._parts(iter(self.loader))

    def _parts(self, batches: Iterator[tuple[Any, bool]]) -> Iterator[Any]:
        for batch, draws in batches:
            count = self.batches.expected.popleft()
            # whole batches have the same samples on all ranks, so that all come to the same answer
            if draws and count is None and not self.batches.stays_whole:
                self.batches.stays_whole = True
                say_whole(
                    "the DataLoader",
                    "its dataset draws from Python's, NumPy's or torch's global generator, which every sample moves on "
                    "(draw from a generator seeded by the sample's index, and ranks can read their own rows)",
                )
            if count is None:
                yield batch
                continue
            rows = mirrored.rows_of(self.placement, count)
            yield tree.map_structure(lambda leaf, rows=rows: split_rows.split(leaf, rows), batch, none_is_leaf=False)


class _WatchedDataset(torch.utils.data.Dataset):
    """A dataset whose samples say whether they drew from a global random generator; used in workers too."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.samples = 0

    def __getitem__(self, index: Any) -> tuple[Any, bool]:
        self.samples += 1
        if self.samples > _WATCHED_SAMPLES:
            return self.dataset[index], False
        before = _global_states()
        sample = self.dataset[index]
        return sample, _global_states() != before

    def __len__(self) -> int:
        return len(self.dataset)


def _global_states() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]


def _collate_with_draws(samples: list[tuple[Any, bool]]) -> tuple[Any, bool]:
    return default_collate([sample for sample, _ in samples]), any(drew for _, drew in samples)
