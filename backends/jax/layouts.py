"""Layouts of keras_flow as shardings of JAX."""

from __future__ import annotations

import functools
from collections.abc import Collection

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import tree

from keras_flow import sbp
from keras_flow.backends.jax.devices import rank_devices
from keras_flow.current.distribution import check_activation, expected
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Split


def mesh(placement: Placement) -> Mesh:
    """The mesh of a placement.

    A rank is a place in `rank_devices()`: ids have gaps across processes, which may have more devices than their share.
    """
    return _mesh(placement, placement.axis_names)


@functools.cache
def _mesh(placement: Placement, axis_names: tuple[str, ...]) -> Mesh:
    """Names are a key of their own: equal placements may have others."""
    devices = rank_devices(placement.type)
    return Mesh(np.array([devices[rank] for rank in placement.ranks]).reshape(placement.hierarchy), axis_names)


def engine_layout(layout: Layout) -> NamedSharding:
    """The sharding of a layout without partial sums whose splits divide."""
    return NamedSharding(mesh(layout.placement), _spec(layout))


def on_every_rank(placement: Placement) -> NamedSharding:
    """The sharding of what every rank of a placement holds whole."""
    return NamedSharding(mesh(placement), PartitionSpec())


def constrain(outputs: object, nd_sbp: sbp.NdSbp, path: str) -> object:
    """Constrain the sharding of a layer's output tensors; uneven dims are legal inside a jitted step."""
    distribution = expected()

    def one(tensor: object) -> object:
        if not isinstance(tensor, jax.Array):
            return tensor
        check_activation(distribution.placement, nd_sbp, tensor.shape, path)
        layout = Layout(distribution.placement, nd_sbp, tensor.shape)
        # in a step XLA is told and may pad; outside of one an array must have equal shards
        if isinstance(tensor, Tracer):
            return jax.lax.with_sharding_constraint(tensor, engine_layout(layout))
        return jax.device_put(tensor, engine_layout(layout)) if layout.divides else tensor

    return tree.map_structure(one, outputs)


def whole_on(value: jax.Array, dims: Collection[int], placement: Placement) -> jax.Array:
    """Return the tensor, inside a jitted step, not split on these dims; XLA chooses the others."""
    spec = PartitionSpec(*(None if dim in dims else PartitionSpec.UNCONSTRAINED for dim in range(value.ndim)))
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh(placement), spec))


def _spec(layout: Layout) -> PartitionSpec:
    # axes for each dim, because several may split one
    dims: list[tuple[str, ...]] = [() for _ in layout.shape]
    for axis, part in zip(layout.placement.axis_names, layout.nd_sbp, strict=True):
        if isinstance(part, Split):
            dims[part.dim] += (axis,)  # the first name is the major one, as the outer axis is in DESIGN's split rule
    return PartitionSpec(*[axes if len(axes) > 1 else axes[0] if axes else None for axes in dims])
