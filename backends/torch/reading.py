"""Arrays and memory maps on PyTorch: a rank of data parallel reads the rows that it computes, and no others.

The order of the logical batches is Keras's own, drawn alike on all ranks; of each batch a rank takes its block. Now and
then, as `data.BatchWatch` says, it reads a whole batch, so that ranks which are fed different data are found.

Example: a batch of the rows 5, 0, 3 and 6 on 2 ranks. Rank 1 reads rows 3 and 6, which are rows 2 and 3 of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras.src import tree

from keras_flow.backends.torch import data, layouts, mirrored, split_rows
from keras_flow.current.distribution import Distribution, active
from keras_flow.placements import Placement


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


def loader(distribution: Distribution, original: Callable[..., Any], adapter: object) -> torch.utils.data.DataLoader:
    """Hook on `ArrayDataAdapter.get_torch_dataloader`: the same batches, of which this rank reads its rows."""
    stock = original(adapter)
    own = OwnRowsDataset(stock.dataset, distribution.placement)
    return torch.utils.data.DataLoader(own, batch_sampler=stock.batch_sampler, collate_fn=stock.collate_fn)
