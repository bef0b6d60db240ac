"""DTensors and values in host memory: components cut from a value, and a value joined from components."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard, TypeVar, overload

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.files import weights_files
from keras_flow.backends.tensorflow import processes
from keras_flow.backends.tensorflow.devices import host_device

_Part = TypeVar("_Part")


def is_dtensor(value: object) -> TypeGuard[tf.Tensor]:
    """Whether an eager tensor or variable is on a mesh."""
    if isinstance(value, dtensor.DVariable):
        return True
    return isinstance(value, tf.Tensor) and hasattr(value, "_numpy_internal") and dtensor.is_dtensor(value)


def cut(value: np.ndarray, layout: dtensor.Layout) -> list[np.ndarray]:
    """The components of a host value, in the order of `dtensor.pack`; views, not copies."""
    locations = layout.mesh.local_device_locations()
    return [weights_files.read(value, index_of(value.shape, layout, where)) for where in locations]


def index_of(shape: Sequence[int], layout: dtensor.Layout, where: Mapping[str, int]) -> tuple[slice, ...]:
    """The elements of the component at a place of the mesh; all along every dim that no mesh axis splits."""
    index = [slice(0, length) for length in shape]
    for dim, spec in enumerate(layout.sharding_specs):
        # even blocks: resolve gives DTensor no split that does not divide
        if spec != dtensor.UNSHARDED:
            size = shape[dim] // layout.mesh.dim_size(spec)
            index[dim] = slice(where[spec] * size, (where[spec] + 1) * size)
    return tuple(index)


def pack(
    components: Sequence[tf.Tensor | np.ndarray], layout: dtensor.Layout, dtype: str | tf.DType | None = None
) -> tf.Tensor:
    """A DTensor from the components of all ranks; each is copied to its own device only.

    A list of components is emptied on the way, so that no component is in memory twice.
    """
    with tf.init_scope():
        tensors = []
        left = components if isinstance(components, list) else list(components)
        # outside of any graph, one component after the other: a copy of the whole is never on a device
        for device in layout.mesh.local_devices():
            with tf.device(device):
                tensors.append(tf.identity(tf.convert_to_tensor(left.pop(0), dtype)))
        assert not left, f"{len(left)} components too many"
        return dtensor.pack(tensors, layout)


def from_logical(value: object, layout: dtensor.Layout, dtype: str | tf.DType | None = None) -> tf.Tensor:
    """A DTensor from a host value, which may be in a file."""
    array = np.asanyarray(value)
    if dtype is not None:
        copy = not weights_files.is_mapped(array)  # parts of a mapped array are copies
        parts = [part.astype(tf.as_dtype(dtype).as_numpy_dtype, copy=copy) for part in cut(array, layout)]
    else:
        parts = cut(array, layout)
    return pack(parts, layout, dtype)


@overload
def to_logical(value: tf.Tensor) -> tf.Tensor: ...
@overload
def to_logical(value: object) -> object: ...
def to_logical(value: object) -> object:
    """The logical value of an eager DTensor as a plain tensor; anything else as it is."""
    if not is_dtensor(value):
        return value
    with tf.device(host_device()):
        return join(value, tf.identity, tf.concat)


def join(value: tf.Tensor, read: Callable[[tf.Tensor], _Part], concat: Callable[..., _Part]) -> _Part:
    """A DTensor's components as one: each read, then joined along the dims that are split."""
    layout = dtensor.fetch_layout(value)
    # other processes may have parts of it: a collective then
    if processes.joined().count > 1 and not layout.is_fully_replicated():
        layout = dtensor.Layout.replicated(layout.mesh, layout.rank)
        value = dtensor.relayout(value, layout)
    parts = dtensor.unpack(value)
    where = layout.mesh.local_device_locations()
    # level by level: first the blocks along the first split dim, within each those along the next
    used = [(dim, spec) for dim, spec in enumerate(layout.sharding_specs) if spec != dtensor.UNSHARDED]

    def joined(level: int, fixed: dict[str, int]) -> _Part:
        if level == len(used):
            return read(
                next(p for p, at in zip(parts, where, strict=True) if all(at[k] == i for k, i in fixed.items()))
            )
        dim, spec = used[level]
        blocks = [joined(level + 1, {**fixed, spec: i}) for i in range(layout.mesh.dim_size(spec))]
        return concat(blocks, dim)

    return joined(0, {})


def is_known(value: object) -> bool:
    """Whether a value is there, and no tensor of a graph."""
    return not isinstance(value, tf.Tensor) or hasattr(value, "_numpy_internal")


def on_host(value: object) -> np.ndarray:
    """A value in host memory: the logical one of a DTensor."""
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if is_dtensor(value):
        return join(value, lambda part: part.numpy(), np.concatenate)
    return value.numpy() if isinstance(value, tf.Tensor) else np.asanyarray(value)
