"""Values of new variables, made shard by shard: `random="logical"` draws any block of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.backends.tensorflow.devices import host_device

_creating: ContextVar[bool] = ContextVar("keras_flow_creating_values", default=False)


def creating_values() -> bool:
    """Whether values of a variable are being made: on the host, not on a mesh."""
    return _creating.get()


#: gives the elements of a new variable in a block of it
Block: TypeAlias = Callable[[tuple[slice, ...]], np.ndarray]


def constant(initializer: Callable, dtype: str) -> Block | None:
    """The blocks of a new variable whose elements are all the same; None for other initialisers."""
    if constant_of(initializer) is None:
        return None
    made: dict[tuple[int, ...], np.ndarray] = {}  # blocks of one shape share it

    def block(index: tuple[slice, ...]) -> np.ndarray:
        lengths = _lengths(index)
        if lengths not in made:
            with making_values():
                made[lengths] = np.asarray(initializer(lengths, dtype=dtype))
        return made[lengths]

    return block


def drawn(initializer: Callable, shape: tuple[int, ...], dtype: str) -> Block | None:
    """The blocks of a new variable, each drawn alone; None where the whole is made and cut.

    That is a stock draw, and what a user's own initialiser makes, or Orthogonal.
    """
    if not is_drawn(initializer) or logical_random.drawing() is None:
        return None
    with making_values():
        fill = logical_random.draw_block(initializer, shape, dtype)

    def block(index: tuple[slice, ...]) -> np.ndarray:
        with making_values():
            return fill(list(index), np.empty(_lengths(index), tf.as_dtype(dtype).as_numpy_dtype))

    return block


def block_of(initializer: Callable, shape: tuple[int, ...], dtype: str, is_split: bool = True) -> Block:
    """The blocks of a new variable, made the cheapest way; where it is not split its value is made as a whole."""
    block = (constant(initializer, dtype) or drawn(initializer, shape, dtype)) if is_split else None
    if block is not None:
        return block
    with making_values():  # the whole value, once, in host memory
        value = initializer(shape, dtype=dtype)
        whole = value.numpy() if isinstance(value, tf.Tensor) else np.asarray(value)
    return whole.astype(tf.as_dtype(dtype).as_numpy_dtype).__getitem__


def _lengths(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in index)


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
