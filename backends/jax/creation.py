"""Values of new variables, made shard by shard: `random="logical"` draws any block of them alone."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn


def constant(
    initializer: Callable[..., object], shape: tuple[int, ...], dtype: str, sharding: Sharding
) -> jax.Array | None:
    """The value of a new variable whose elements are all the same; None for other initialisers."""
    value = constant_of(initializer)
    if value is None:
        return None
    shard = np.full(sharding.shard_shape(shape), value, jnp.dtype(dtype))
    return jax.make_array_from_callback(shape, sharding, lambda index: shard, dtype=shard.dtype)


def drawn(
    initializer: Callable[..., object], shape: tuple[int, ...], dtype: str, sharding: Sharding
) -> jax.Array | None:
    """The value of a new variable, or None where the whole is made and cut: a stock draw, or a user's initialiser."""
    if not is_drawn(initializer) or logical_random.drawing() is None:
        return None
    fill = logical_random.draw_block(initializer, shape, dtype)

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = [slice(*part.indices(length)[:2]) for part, length in zip(index or (), shape, strict=True)]
        return fill(slices, np.empty([part.stop - part.start for part in slices], jnp.dtype(dtype)))

    # a process that has none of the devices is asked for no block
    return jax.make_array_from_callback(shape, sharding, block, dtype=jnp.dtype(dtype))
