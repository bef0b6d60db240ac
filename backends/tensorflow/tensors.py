"""Global tensors on TensorFlow: one tensor on the device of each rank; gradients by `tf.GradientTape`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.distribute.values import (
    MirroredVariable as _MirroredVariable,  # private: tf.distribute names none of its variables (tensorflow 2.21)
)

from keras_flow import sbp
from keras_flow.backends.tensorflow.devices import rank_devices, world
from keras_flow.backends.tensorflow.layouts import mesh_view, ranks_of
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement


def put(value: np.ndarray, rank: int) -> tf.Tensor:
    """Put a value on the device of a rank."""
    with on_rank(rank):
        return tf.identity(tf.constant(value))


def as_numpy(value: tf.Tensor) -> np.ndarray:
    """The value."""
    return value.numpy()


def on_rank(rank: int) -> AbstractContextManager[object]:
    """Operators compute on the device of a rank."""
    return tf.device(rank_devices()[rank])


def vjp(function: Callable[..., list], values: Sequence[Any]) -> tuple[list, Callable[..., list]]:
    """Use a tape of its own, which tells tensors apart: one that is given twice has two gradients."""
    # `x * x` is given one tensor twice; a tape would add the two gradients up
    values = [tf.identity(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(values)
        results = function(*values)

    def pullback(*cotangents: tf.Tensor) -> list:
        gradients = tape.gradient(results, values, list(cotangents), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    return results, pullback


def to_engine(layout: Layout, shards: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """A DTensor of these components."""
    # DTensor puts one mesh axis on a dim, and has neither partial sums nor uneven shards
    twice = [dim for dim in range(len(layout.shape)) if len(layout.axes_of_dim(dim)) > 1]
    if layout.has_partial or not layout.divides or twice:
        why = "partial sums" if layout.has_partial else "dims split by two axes" if twice else "uneven shards"
        raise FlowError(f"a TensorFlow DTensor has no {why}: {layout}. Change the layout first, x.to_global(sbp=...)")
    view = mesh_view(layout.placement)
    engine = view.layout(layout.nd_sbp, layout.placement.axis_names, len(layout.shape))
    return dtensor.pack([shards[rank] for rank in view.ranks], engine)


def from_engine(value: Any) -> tuple[Layout, dict[int, tf.Tensor]] | None:
    """The layout of a DTensor, or of a variable of tf.distribute that each replica has a copy of."""
    if isinstance(value, _MirroredVariable):
        copies = dict(enumerate(value.values))
        return Layout(Placement(list(copies)), sbp.broadcast, tuple(value.shape)), copies
    value = value.read_value() if isinstance(value, tf.Variable) else value
    if not tf.is_tensor(value) or not dtensor.is_dtensor(value):
        return None
    engine = dtensor.fetch_layout(value)
    mesh = engine.mesh
    placement = Placement(ranks_of(mesh), mesh.dim_names)
    parts = {axis: sbp.split(dim) for dim, axis in enumerate(engine.sharding_specs) if axis != dtensor.UNSHARDED}
    layout = Layout(placement, parts, tuple(value.shape))
    mine = [rank for rank in placement.ranks if rank in world().local_ranks]
    return layout, dict(zip(mine, dtensor.unpack(value), strict=True))
