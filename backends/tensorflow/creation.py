"""Values of new variables, made shard by shard: `random="logical"` draws any block of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.backends.tensorflow.devices import host_device

_creating: ContextVar[bool] = ContextVar("keras_flow_creating_values", default=False)


def creating_values() -> bool:
    """Whether values of a variable are being made: on the host, not on a mesh."""
    return _creating.get()


def constant(
    initializer: Callable, shape: tuple[int, ...], dtype: str, layout: dtensor.Layout
) -> list[np.ndarray] | None:
    """The components of a new variable whose elements are all the same; None for other initialisers.

    Here and below components are in the order of `dtensor.pack`.
    """
    if layout.is_fully_replicated() or constant_of(initializer) is None:
        return None
    local = tuple(
        length if spec == dtensor.UNSHARDED else length // layout.mesh.dim_size(spec)
        for length, spec in zip(shape, layout.sharding_specs, strict=True)
    )
    with making_values():
        return [np.asarray(initializer(local, dtype=dtype))] * layout.mesh.num_local_devices()


def drawn(initializer: Callable, shape: tuple[int, ...], dtype: str, layout: dtensor.Layout) -> list[np.ndarray] | None:
    """The components of a new variable, each drawn alone; None where the whole is made and cut.

    That is a stock draw, and what a user's own initialiser makes, or Orthogonal.
    """
    if layout.is_fully_replicated() or not is_drawn(initializer) or logical_random.drawing() is None:
        return None
    with making_values():
        fill = logical_random.draw_block(initializer, shape, dtype)
        # ranks that hold the same block share one draw
        blocks = {
            index: fill(
                [slice(*part) for part in index],
                np.empty([stop - start for start, stop in index], tf.as_dtype(dtype).as_numpy_dtype),
            )
            for index in dict.fromkeys(_blocks(shape, layout))
        }
    return [blocks[index] for index in _blocks(shape, layout)]


@contextmanager
def making_values() -> Iterator[None]:
    """Inside, values of a variable are made: on the host, and in no graph."""
    token = _creating.set(True)
    try:
        # on the host: under a mesh, TensorFlow would put the values on all devices
        with tf.init_scope(), tf.device(host_device()):
            yield
    finally:
        _creating.reset(token)


def _blocks(shape: tuple[int, ...], layout: dtensor.Layout) -> list[tuple[tuple[int, int], ...]]:
    """Start and stop along each dim of the block of each rank, in the order of `dtensor.pack`."""
    blocks = []
    for where in layout.mesh.local_device_locations():
        block = []
        for length, spec in zip(shape, layout.sharding_specs, strict=True):
            size = length // (1 if spec == dtensor.UNSHARDED else layout.mesh.dim_size(spec))
            start = 0 if spec == dtensor.UNSHARDED else where[spec] * size
            block.append((start, start + size))
        blocks.append(tuple(block))
    return blocks
