"""How a batch is laid over the data ranks: the one place that knows what divides."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from keras_flow.errors import ComputedWhole
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
        """Rows of the smallest buffer that divides."""
        return -(-self.rows // self.replicas) * self.replicas

    def block(self, index: int) -> tuple[int, int]:
        """Start and stop of the rows of one data rank, by the balanced split rule."""
        return balanced(self.rows, self.replicas, index)


def rows_of(leaves: Sequence[object]) -> tuple[int, ...]:
    """Length of dimension 0 of each tensor of a batch; None leaves and scalars have none."""
    shapes = [
        tuple(getattr(leaf, "shape", None) or np.shape(cast(ArrayLike, leaf))) for leaf in leaves if leaf is not None
    ]
    return tuple(int(shape[0]) for shape in shapes if shape)


class UnevenNotice:
    """Says once that the batch size itself does not divide, and which size does."""

    def __init__(self) -> None:
        self._said = False
        self._asked: int | None = None

    @contextmanager
    def expecting(self, batch_size: int | None) -> Iterator[None]:
        """Inside, the batch size is the one that was asked for, whatever the first batch holds (data that are shorter
        than one batch); None: it is told by the first batch."""
        before, self._asked = self._asked, batch_size
        try:
            yield
        finally:
            self._asked = before

    def see(self, rows: int, replicas: int) -> None:
        """Tell it the first batch of an epoch, on an engine that computes an uneven batch on every rank."""
        rows = self._asked or rows
        if self._said or rows % replicas == 0:
            return
        self._said = True
        warnings.warn(
            f"a batch of {rows} rows does not divide by {replicas} data ranks: each rank computes it whole (the "
            f"numbers are those of one device, nothing is gained). The next batch size that divides is "
            f"{BatchPlan(rows, replicas).padded_rows}",
            ComputedWhole,
            stacklevel=3,
        )
