"""The order of samples: the same on every backend and layout, because it is drawn here and not by an engine."""

from __future__ import annotations

import keras
import numpy as np
from keras import tree

from keras_flow.errors import FlowError


def length_of(data: object) -> int:
    """Rows of a structure of arrays.

    Raises:
        FlowError: the arrays have different numbers of rows.
    """
    lengths = {len(leaf) for leaf in tree.flatten(data)}
    if len(lengths) != 1:
        raise FlowError(f"load_data() returned arrays of different lengths: {sorted(lengths)}")
    return lengths.pop()


class Ordered(keras.utils.PyDataset):
    """Batches in an order that depends on the seed and the epoch only.

    Args:
        x: structure of arrays of shape [rows, ...].
        y: the same for targets.
        batch_size: rows of a batch; the last one of an epoch may be smaller.
        seed: seed of the order.
    """

    def __init__(self, x: object, y: object, batch_size: int, seed: int):
        super().__init__()
        self._x, self._y, self._batch, self._seed = x, y, batch_size, seed
        self._rows = length_of((x, y))
        self._epoch = 0
        self._order = self._draw()

    def _draw(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._rows)

    def __len__(self) -> int:
        return -(-self._rows // self._batch)

    def __getitem__(self, index: int) -> tuple[object, object]:
        rows = self._order[index * self._batch : (index + 1) * self._batch]
        x, y = (tree.map_structure(lambda leaf: np.asarray(leaf)[rows], part) for part in (self._x, self._y))
        return x, y

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch of an epoch."""
        return [min(self._batch, self._rows - start) for start in range(0, self._rows, self._batch)]

    def on_epoch_end(self) -> None:
        self._epoch += 1
        self._order = self._draw()
