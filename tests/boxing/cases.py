"""Layouts, shards and random pairs for the tests of boxing."""

from __future__ import annotations

import itertools

import numpy as np

from keras_flow import sbp
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import PartialSum

SBPS = (sbp.split(0), sbp.split(1), sbp.broadcast, sbp.partial_sum)


def grid(hierarchy: tuple[int, ...], first: int = 0) -> Placement:
    """A placement of consecutive ranks."""
    return Placement(np.arange(first, first + int(np.prod(hierarchy))).reshape(hierarchy))


def all_nd_sbps(axes: int, sbps=SBPS):
    """Every nd_sbp on so many axes."""
    return list(itertools.product(sbps, repeat=axes))


def shards_of(layout: Layout, logical: np.ndarray, seed: int = 0) -> dict[int, np.ndarray]:
    """Shards that combine to `logical`: small integers as summands, so that sums are exact in any order."""
    random = np.random.default_rng(seed)
    classes = [axis for axis, part in enumerate(layout.nd_sbp) if isinstance(part, PartialSum)]
    sizes = [layout.placement.hierarchy[axis] for axis in classes]
    summands = {index: random.integers(-8, 8, logical.shape) for index in itertools.product(*map(range, sizes))}
    first = (0,) * len(sizes)
    summands[first] = logical - sum(value for index, value in summands.items() if index != first)
    out = {}
    for rank in layout.placement.ranks:
        at = layout.placement.coordinates(rank)
        out[rank] = summands[tuple(at[axis] for axis in classes)][layout.local_slices(rank)].astype("float64")
    return out


def logical_tensor(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Integers as float64."""
    return np.random.default_rng(seed).integers(-100, 100, shape).astype("float64")


def families(layout: Layout):
    """What a layout promises: ranks whose shards sum to a part of the logical tensor, and that part; each copy once."""
    placement = layout.placement
    partial = [axis for axis, part in enumerate(layout.nd_sbp) if isinstance(part, PartialSum)]
    found: dict[tuple, list[int]] = {}
    for rank in placement.ranks:
        at = placement.coordinates(rank)
        found.setdefault(tuple(-1 if axis in partial else at[axis] for axis in range(len(at))), []).append(rank)
    return [(ranks, layout.local_slices(ranks[0])) for ranks in found.values()]


def copies(layout: Layout) -> list[list[int]]:
    """The ranks that differ only along axes with B, and so hold equal shards."""
    found: dict[tuple, list[int]] = {}
    for rank in layout.placement.ranks:
        parts = zip(layout.placement.coordinates(rank), layout.nd_sbp, strict=True)
        found.setdefault(tuple(-1 if part == sbp.broadcast else index for index, part in parts), []).append(rank)
    return list(found.values())
