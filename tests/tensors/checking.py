"""What the tests of global tensors share: placements, tensors on them, and what is equal."""

from __future__ import annotations

from typing import Any

import numpy as np

import keras_flow as kf
from keras_flow import sbp
from keras_flow.layout import Layout
from tests.tensors.cases import Case

MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("a", "b"))
LINE = kf.Placement([0, 1, 2, 3])
ALONE = kf.Placement([0])


def spread(value: Any, layout: str) -> kf.GlobalTensor:
    """The value on the 2x2 mesh."""
    return kf.tensor(value, placement=MESH, sbp=layout)


def close(found: np.ndarray, wanted: np.ndarray, dtype: str = "float32") -> bool:
    """Equal up to the rounding of sums."""
    if np.shape(found) != np.shape(wanted):
        return False
    if not np.issubdtype(np.asarray(wanted).dtype, np.floating):
        return bool(np.array_equal(found, wanted))
    limit = 2e-2 if dtype == "float16" else 2e-4
    return bool(np.allclose(np.asarray(found, "float64"), np.asarray(wanted, "float64"), rtol=limit, atol=limit))


def arguments_of(case: Case) -> tuple[list, dict]:
    """Positional and named arguments of a case."""
    if case.name == "einsum":
        return [case.options["subscripts"], *case.tensors["operands"]], {}
    return [], {**case.tensors, **case.options}


def shards_of(layout: Layout, value: np.ndarray, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Shards of a value; over a P axis random summands of it."""
    shards = {rank: value[layout.local_slices(rank)] for rank in layout.placement.ranks}
    partial = [axis for axis, part in enumerate(layout.nd_sbp) if part == sbp.partial_sum]
    if not partial:
        return shards
    families: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.placement.ranks:
        at = layout.placement.coordinates(rank)
        families.setdefault(tuple(-1 if axis in partial else at[axis] for axis in range(len(at))), []).append(rank)
    summands_of: dict[tuple, list[np.ndarray]] = {}
    for key, ranks in families.items():
        same = tuple(-1 if layout.nd_sbp[axis] == sbp.broadcast else index for axis, index in enumerate(key))
        if same not in summands_of:  # copies on a B axis have the same summands
            summands_of[same] = summands_adding_to(shards[ranks[0]], len(ranks), rng)
        shards |= dict(zip(ranks, summands_of[same], strict=True))
    return shards


def summands_adding_to(value: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random summands of a value: whole numbers wrap on the way, and truths are given by several."""
    if value.dtype == bool:
        return [value, *[value & (rng.random(value.shape) < 0.5) for _ in range(count - 1)]]
    if value.dtype.kind in "iu":
        limits = np.iinfo(value.dtype)
        summands = [rng.integers(limits.min, limits.max, value.shape, value.dtype) for _ in range(count - 1)]
    else:
        summands = [rng.normal(size=value.shape).astype(value.dtype) for _ in range(count - 1)]
    return [*summands, (value - sum(summands)).astype(value.dtype)]
