"""Global tensors on JAX: one committed array for each rank; gradients by `jax.vjp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from keras_flow.backends.jax.devices import rank_devices
from keras_flow.backends.jax.layouts import engine_layout
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Split, broadcast


def put(value: np.ndarray, rank: int) -> jax.Array:
    """Put a value on the device of a rank, where it stays."""
    return jax.device_put(value, rank_devices()[rank])


def as_numpy(value: jax.Array) -> np.ndarray:
    """The value."""
    return np.asarray(value)


def on_rank(rank: int) -> AbstractContextManager[object]:
    """New arrays are made on the device of a rank; what is computed from committed arrays stays with them."""
    return jax.default_device(rank_devices()[rank])


def vjp(function: Callable[..., list], values: Sequence[Any]) -> tuple[list, Callable[..., list]]:
    """Use `jax.vjp`."""
    results, pullback = jax.vjp(function, *values)
    return results, lambda *cotangents: list(pullback(list(cotangents)))


def to_engine(layout: Layout, shards: Mapping[int, jax.Array]) -> jax.Array:
    """A `jax.Array` over the mesh of the placement."""
    if layout.has_partial or not layout.divides:
        why = "partial sums" if layout.has_partial else "shards of different shapes"
        raise FlowError(f"a jax.Array has no {why}: {layout}. Change the layout first, x.to_global(sbp=...)")
    sharding = engine_layout(layout)
    return jax.make_array_from_single_device_arrays(layout.shape, sharding, list(shards.values()))


def from_engine(value: Any) -> tuple[Layout, dict[int, jax.Array]] | None:
    """The layout of an array with a NamedSharding, or of one on a single device."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return None
    ranks = {device: rank for rank, device in enumerate(rank_devices())}
    shards = {ranks[shard.device]: shard.data for shard in value.addressable_shards}
    sharding = value.sharding
    if isinstance(sharding, NamedSharding):
        devices = np.vectorize(ranks.__getitem__, otypes=[int])(sharding.mesh.devices)
        return _layout(devices, sharding.mesh.axis_names, sharding.spec, value.shape), shards
    # an array that was never given a layout
    if len(shards) == 1:
        return Layout(Placement(list(shards)), broadcast, value.shape), shards
    raise FlowError(f"a layout with named axes is needed to read an array; this one has {sharding}")


def _layout(ranks: np.ndarray, names: Sequence[str], spec: PartitionSpec, shape: Sequence[int]) -> Layout:
    """The placement whose axes split each dim in the order of the spec.

    The axes of a spec that split one dim are outer and inner as they are named, those of a placement by their order.
    """
    parts = {}
    for dim, axes in enumerate(spec):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            parts[axis] = Split(dim)
    order = list(range(len(names)))
    # a spec may name an inner axis first; then the placement takes the axes in that order
    if any(isinstance(axes, tuple) and list(axes) != sorted(axes, key=names.index) for axes in spec):
        named = [names.index(axis) for axis in parts]
        order = [*named, *(place for place in order if place not in named)]
    placement = Placement(ranks.transpose(order), [names[place] for place in order])
    return Layout(placement, parts, tuple(shape))
