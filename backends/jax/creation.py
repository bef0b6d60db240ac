"""Values of new variables, drawn in blocks, device by device: those that one device would have, bit by bit.

Threefry is a counter-based generator (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): with
`jax_threefry_partitionable` every value is a function of the key and of its position. A key of our own kind carries the
position of a block, so that `jax.random` draws the block alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from keras import initializers

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.current.keras_places import compute_fans, draw_seed

#: elements of a block; a draw needs several times as many bytes while it runs
_BLOCK = 1 << 20


@dataclass(frozen=True)
class _BlockDraw:
    """`kind` of `jax.random` draw; uniform from `low` to `high`, else times `high` plus `low`."""

    kind: str
    low: float
    high: float


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
    """The value of a new variable, or None where it cannot be drawn in blocks: then XLA partitions the whole draw."""
    if is_drawn(initializer) and logical_random.drawing() is not None:
        fill = logical_random.draw_block(initializer, shape, dtype)

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            slices = [slice(*part.indices(length)[:2]) for part, length in zip(index or (), shape, strict=True)]
            return fill(slices, np.empty([part.stop - part.start for part in slices], jnp.dtype(dtype)))

        return jax.make_array_from_callback(shape, sharding, block)
    if (
        not is_drawn(initializer)
        or dtype != "float32"
        or not shape
        or not 0 < math.prod(shape) < 2**32
        or jax.config.jax_default_prng_impl != "threefry2x32"  # pyright: ignore[reportAttributeAccessIssue]
        or not jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    ):
        return None
    draw = _draw_of(initializer, shape)
    seed = np.asarray(draw_seed(initializer.seed), np.uint32)
    strides = np.array([math.prod(shape[dim + 1 :]) for dim in range(len(shape))], np.uint32)
    made: dict[tuple, jax.Array] = {}
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(part.indices(length)[:2] for part, length in zip(index or (), shape, strict=True))
        if box not in made:
            first = np.uint32(sum(start * int(stride) for (start, _), stride in zip(box, strides, strict=True)))
            local = tuple(stop - start for start, stop in box)
            with jax.default_device(device):
                value = _shard(seed, first, strides, draw=draw, shape=local)
                if draw.kind != "uniform":  # outside of the program, as in Keras: fused, it would be rounded otherwise
                    value = value * draw.high + draw.low
                made[box] = value.block_until_ready()
        pieces.append(jax.device_put(made[box], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _draw_of(initializer: Callable[..., object], shape: tuple[int, ...]) -> _BlockDraw:
    """What an initialiser draws for a variable of this shape."""
    if isinstance(initializer, initializers.RandomUniform):
        return _BlockDraw("uniform", initializer.minval, initializer.maxval)
    if isinstance(initializer, initializers.TruncatedNormal):
        return _BlockDraw("truncated_normal", initializer.mean, initializer.stddev)
    if isinstance(initializer, initializers.RandomNormal):
        return _BlockDraw("normal", initializer.mean, initializer.stddev)
    assert isinstance(initializer, initializers.VarianceScaling)
    fan_in, fan_out = compute_fans(shape, input_axes=initializer.input_axes, output_axes=initializer.output_axes)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2.0}[initializer.mode]
    scale = initializer.scale / max(1.0, fan)
    if initializer.distribution == "truncated_normal":
        return _BlockDraw("truncated_normal", 0.0, math.sqrt(scale) / 0.87962566103423978)  # of a normal cut at 2 sigma
    if initializer.distribution == "untruncated_normal":
        return _BlockDraw("normal", 0.0, math.sqrt(scale))
    limit = math.sqrt(3.0 * scale)
    return _BlockDraw("uniform", -limit, limit)


@functools.partial(jax.jit, static_argnames=("draw", "shape"))
def _shard(
    seed: jax.Array, first: jax.Array, strides: jax.Array, *, draw: _BlockDraw, shape: tuple[int, ...]
) -> jax.Array:
    """A shard whose first element has the number `first` in the logical tensor; `strides` are those of the tensor."""
    rows = max(1, min(shape[0], _BLOCK // math.prod(shape[1:])))

    def put(number: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.minimum(number * rows, shape[0] - rows)  # the last block may draw rows again
        start = first + row.astype(jnp.uint32) * strides[0]
        key = jax.random.wrap_key_data(jnp.concatenate([seed, start[None], strides]), impl=_keys(len(shape)))
        return lax.dynamic_update_slice_in_dim(out, _drawn(draw, key, (rows, *shape[1:])), row, 0)

    return lax.fori_loop(0, -(-shape[0] // rows), put, jnp.zeros(shape, jnp.float32))


def _drawn(draw: _BlockDraw, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the numbers that `keras.random` draws; normals are not scaled yet."""
    if draw.kind == "uniform":
        return jax.random.uniform(key, shape, jnp.float32, minval=draw.low, maxval=draw.high)
    if draw.kind == "normal":
        return jax.random.normal(key, shape, jnp.float32)
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


@functools.cache
def _keys(ndim: int) -> Hashable:
    """The kind of key: the two words of the seed, the number of the block's first element, the tensor's strides."""

    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        assert width == 32  # of float32
        count = jnp.broadcast_to(key[2], shape)
        for dim in range(ndim):
            count = count + lax.broadcasted_iota(jnp.uint32, shape, dim) * key[3 + dim]
        one, other = jax.extend.random.threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(count), count)
        return one ^ other

    def refuse(*_: object) -> jax.Array:
        raise NotImplementedError("keys of blocks are drawn from once")

    return jax.extend.random.define_prng_impl(
        key_shape=(3 + ndim,),
        seed=refuse,
        split=refuse,
        fold_in=refuse,
        random_bits=bits,
        name=f"keras_flow_block_{ndim}d",
        tag="kfb",
    )
