"""How the rows of a batch divide over the data ranks. All engines and `explain` ask here.

>>> plan = BatchPlan(rows=10, replicas=4)
>>> plan.divides, plan.padded_rows, [plan.block(index) for index in range(4)]
(False, 12, [(0, 3), (3, 6), (6, 8), (8, 10)])
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from keras_flow.errors import ComputedWhole, warn
from keras_flow.layout import balanced


@dataclass(frozen=True)
class BatchPlan:
    """A batch of `rows` rows on `replicas` data ranks.

    Attributes:
        rows: rows of the logical batch.
        replicas: number of blocks into which the batch axes split it.
    """

    rows: int
    replicas: int

    @property
    def divides(self) -> bool:
        """Whether all data ranks get the same number of rows."""
        return self.rows % self.replicas == 0

    @property
    def padded_rows(self) -> int:
        """The smallest number of rows, from `rows` up, that divides."""
        return -(-self.rows // self.replicas) * self.replicas

    def block(self, index: int) -> tuple[int, int]:
        """Start and stop of the rows of one data rank, by the balanced split rule."""
        return balanced(self.rows, self.replicas, index)


def rows_asked(batch_size: object) -> int | None:
    """Return the rows that a user's `batch_size` says, also as a whole number of NumPy's; None where it says none.

    >>> rows_asked(np.int64(30)), rows_asked(0), rows_asked(True), rows_asked(2.0)
    (30, 0, None, None)
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral) or batch_size < 0:
        return None
    return int(batch_size)


def rows_of(leaves: Sequence[object]) -> tuple[int, ...]:
    """Length of dim 0 of each tensor of a batch; Nones and scalars are left out."""
    shapes = [
        tuple(getattr(leaf, "shape", None) or np.shape(cast(ArrayLike, leaf))) for leaf in leaves if leaf is not None
    ]
    return tuple(int(shape[0]) for shape in shapes if shape)


class UnevenNotice:
    """Warns once that the batch size itself does not divide, and says which size does.

    Only the last batch of an epoch being shorter is no reason to warn.
    """

    def __init__(self) -> None:
        self._warned = False
        self._batch_size: int | None = None  # as given to `fit`; None where it is not known

    @contextmanager
    def expecting(self, batch_size: int | None) -> Iterator[None]:
        """Inside, judge this batch size, not the rows of the first batch, which are fewer where all data are.

        None: the first batch has the batch size.
        """
        before, self._batch_size = self._batch_size, batch_size
        try:
            yield
        finally:
            self._batch_size = before

    def see(self, rows: int, replicas: int, fewest: int | None = None) -> None:
        """Warn if the first batch of an epoch does not divide.

        Engines call it that compute such a batch on every rank (`Capabilities.uneven_batches`).

        Args:
            rows: rows of the first batch; where `fit` was given a batch size, that is judged.
            replicas: number of data ranks.
            fewest: batches with so many rows, and more, are shared by the ranks though they do not divide.
        """
        rows = self._batch_size or rows
        if self._warned or rows % replicas == 0 or (fewest is not None and rows >= fewest):
            return
        self._warned = True
        warn(
            f"a batch of {rows} rows does not divide by {replicas} data ranks: each rank computes it whole (the "
            f"numbers are those of one device, nothing is gained). The next batch size that divides is "
            f"{BatchPlan(rows, replicas).padded_rows}",
            ComputedWhole,
        )
