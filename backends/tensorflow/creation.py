"""Values of new variables, made shard by shard: those that one device would have, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops
from tensorflow.python.ops import random_ops_util

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.backends.tensorflow.devices import host_device

#: most elements of one draw that is cut into columns
_CHUNK = 1 << 20
#: kind of draw -> (operation, Philox counters that it uses for four values). Checked bit by bit with TensorFlow 2.21.
_DRAWS = {
    "uniform": (random_ops.stateless_random_uniform_v2, 1),
    "normal": (random_ops.stateless_random_normal_v2, 1),
    "truncated_normal": (random_ops.stateless_truncated_normal_v2, 256),
}


@dataclass(frozen=True)
class Draw:
    """A draw that is not made yet: `values * scale + shift` of a whole tensor.

    Attributes:
        kind: a key of the table of draws.
        shape: logical shape, in elements.
        seed: the two seed words.
        scale: factor.
        shift: summand.
    """

    kind: str
    shape: tuple[int, ...]
    seed: np.ndarray
    scale: tf.Tensor
    shift: tf.Tensor


_recording: ContextVar[list[Draw] | None] = ContextVar("keras_flow_recorded_draws", default=None)
_creating: ContextVar[bool] = ContextVar("keras_flow_creating_values", default=False)


def recording() -> list[Draw] | None:
    """Return the list of draws that an initializer which is asked would make; None: none is asked."""
    return _recording.get()


def creating_values() -> bool:
    """Whether values of a variable are being made: on the host, not on a mesh."""
    return _creating.get()


def record(draws: list[Draw], draw: Draw) -> tf.Tensor:
    """Note a draw; the initializer gets an empty tensor in its place."""
    draws.append(draw)
    return tf.zeros((0,), draw.scale.dtype)


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
    """The components of a new variable, drawn in blocks of the whole draw; None where it cannot be drawn so."""
    if layout.is_fully_replicated() or not is_drawn(initializer):
        return None
    if logical_random.drawing() is not None:
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
    if dtype != "float32":
        return None
    with making_values():
        return _drawn(_draw_of(initializer, shape, dtype), layout)


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


def _draw_of(initializer: Callable, shape: tuple[int, ...], dtype: str) -> Draw:
    token = _recording.set([])
    try:
        initializer(shape, dtype=dtype)
        # the hooks on Keras's random functions have noted the draw, and drawn nothing
        draws = _recording.get()
    finally:
        _recording.reset(token)
    assert draws is not None and len(draws) == 1  # each of these initializers makes one draw
    return draws[0]


def _drawn(draw: Draw, layout: dtensor.Layout) -> list[np.ndarray]:
    """Each rank's elements: a draw is a flat sequence, so rows `a:b` of it are made alone and cut to columns."""
    rows, columns = draw.shape[0], int(np.prod(draw.shape[1:]))
    order = _blocks(draw.shape, layout)
    out = {index: np.empty([b - a for a, b in index], "float32") for index in order}
    # a chunk of rows is one draw that all ranks with elements in it share
    smallest = max(1, min(b - a for (a, b), *_ in order) if layout.sharding_specs[0] != dtensor.UNSHARDED else rows)
    parts = layout.mesh.num_local_devices()
    step = max(1, min(smallest, -(-rows // parts), _CHUNK // max(1, columns)))
    for first in range(0, rows, step):
        last = min(rows, first + step)
        block = _rows(draw, first, last)
        for index, shard in out.items():
            low, high = max(first, index[0][0]), min(last, index[0][1])
            if low < high:
                inner = tuple(slice(a, b) for a, b in index[1:])
                shard[low - index[0][0] : high - index[0][0]] = block[(slice(low - first, high - first), *inner)]
    return [out[index] for index in order]


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


def _rows(draw: Draw, first: int, last: int) -> np.ndarray:
    """Rows `first:last` of a draw, in float32.

    Philox is a counter-based generator (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): every
    value is a function of the key and of its position, four values to a counter.
    """
    op, counters = _DRAWS[draw.kind]
    columns = int(np.prod(draw.shape[1:]))
    start, stop = first * columns, last * columns
    skipped = start // 4
    key, counter, algorithm = random_ops_util.get_key_counter_alg(tf.constant(draw.seed), "auto_select")
    # two words of 64 bits, of which the low one counts
    low, high = (int(word) for word in cast("tf.Tensor", counter).numpy())
    total = low + (high << 64) + skipped * counters
    counter = tf.constant(np.array([total & (2**64 - 1), (total >> 64) & (2**64 - 1)], np.uint64))
    flat = op([stop - skipped * 4], key=key, counter=counter, dtype=tf.float32, alg=algorithm)
    flat = flat[start - skipped * 4 :] * draw.scale + draw.shift
    return flat.numpy().reshape((last - first, *draw.shape[1:]))
