"""The order of samples, drawn here with NumPy and not by an engine, so that it is the same on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from keras import tree

from keras_flow.user_file import length_of


class Ordered:
    """Batches in an order that depends on the seed and the epoch only; all epochs in one sequence.

    Not a PyDataset, which Keras starts again at each of its epochs: a comparison trains in epochs of one step.

    Args:
        x: structure of arrays of shape [rows, ...].
        y: the same for targets.
        batch_size: rows of a batch; the last one of an epoch may be smaller.
        seed: seed of the order.
        steps: number of batches; None is one epoch.
    """

    def __init__(self, x: object, y: object, batch_size: int, seed: int, steps: int | None = None):
        self._x, self._y, self._batch, self._seed = x, y, batch_size, seed
        self._rows = length_of((x, y))
        self.per_epoch = -(-self._rows // batch_size)
        self._steps = steps or self.per_epoch
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> tuple[object, object]:
        # batch 7 of epochs of 3 batches is batch 1 of epoch 2
        epoch, batch = divmod(index, self.per_epoch)
        rows = self._order_of(epoch)[batch * self._batch : (batch + 1) * self._batch]
        batch_of = tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf)[rows], (self._x, self._y))
        return cast("tuple[object, object]", batch_of)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        return (self[index] for index in range(len(self)))

    def _order_of(self, epoch: int) -> np.ndarray:
        # kept for the epoch: batches are asked for one by one
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self._rows))
        return self._order[1]
