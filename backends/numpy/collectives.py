"""`kf.comm` on numpy: all ranks are in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_flow.backends.collective_engine import Counts, Pending


def key_of(value: object, rank: int) -> None:
    """Never: an array of the caller's can be written into, so it is copied."""


def exchange(ranks: tuple[int, ...], values: Mapping[int, np.ndarray], counts: Counts) -> Pending:
    """Parts of each rank's flat array for each member."""
    parts = {
        rank: np.split(values[rank], np.cumsum(row)[:-1]) for rank, row in zip(ranks, counts.table, strict=True)
    }  # sender -> by receiver
    arrived = {rank: np.concatenate([parts[sender][place] for sender in ranks]) for place, rank in enumerate(ranks)}
    return Pending(lambda: arrived)


def gather_all(ranks: tuple[int, ...], values: Mapping[int, np.ndarray], counts: Sequence[int]) -> Pending:
    """All flat arrays, on each."""
    joined = np.concatenate([values[sender] for sender in ranks])
    return Pending(lambda: {rank: joined.copy() for rank in ranks})


def native(kind: str, ranks: tuple[int, ...], values: Mapping[int, np.ndarray], how: str | int) -> None:
    """numpy has none: here `kf.comm` shows what it puts together."""


def direct(
    call: str, ranks: tuple[int, ...], like: np.ndarray | list[np.ndarray], how: tuple[Any, ...], async_op: bool
) -> None:
    """numpy has none."""


def fold(rows: np.ndarray, op: str) -> np.ndarray:
    """Rows [ranks, elements] as one, in their dtype."""
    reduce = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op].reduce
    return np.asarray(reduce(rows, axis=0, dtype=rows.dtype))


def reshape(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array in another shape."""
    return value.reshape(shape)


def join(flat: Sequence[np.ndarray]) -> np.ndarray:
    """Join flat arrays, one after the other."""
    return np.concatenate(flat)


def shape(value: np.ndarray) -> tuple[int, ...]:
    """Return the shape, which is a tuple of numbers."""
    return value.shape


def without_gradient(value: np.ndarray) -> np.ndarray:
    """There is none."""
    return value


def is_recorded(values: Sequence[np.ndarray]) -> bool:
    """Nothing is."""
    return False


def with_gradient(
    forward: Callable[[Sequence[Any]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """numpy differentiates nothing."""
    return forward(values)
