"""Philox by logical index in XLA programs, for `random="logical"`; see `keras_flow/philox.py` for the numbering.

Every element computes its counter's four words and takes its own: nothing but iota and arithmetic by elements, which
XLA's partitioner cuts as the consumer is cut. JAX's own Threefry takes more time for the same elements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from keras_flow import philox
from keras_flow.backends import logical_random
from keras_flow.backends.engine_records import RandomPart
from keras_flow.errors import FlowError


def random_part(
    shape: tuple[int, ...], inputs: object, noise_shape: Sequence[int | None] | None, is_whole: bool
) -> RandomPart | None:
    """All elements: XLA leaves out what a rank does not use."""
    if not logical_random.has_known_lengths(shape):
        return None  # the shapes of a step are known as it is traced: this is not one of its draws
    return RandomPart.whole(shape)


def random_words(state: jax.Array) -> tuple[Any, Any]:
    """The two 32-bit words of a seed: numbers, or scalars of the program that is being traced."""
    if isinstance(state, Tracer):
        return state[0], state[1]
    first, second = (int(word) & 0xFFFFFFFF for word in np.asarray(state))
    return first, second


def random_fractions(words: tuple[Any, Any], tag: int, part: RandomPart) -> jax.Array:
    """`philox.fractions` of the elements of a part, float32."""
    first = _first_row(part)
    if first is not None:  # the rows of a micro-batch, whose place the program is told as it runs
        return _fractions(*_seed(words), tag, _own_shape(part), first)
    if part != RandomPart.whole(part.shape, part.finish):
        # a block of a new variable, for one device: its seed is known, and NumPy compiles nothing
        return jnp.asarray(philox.fractions(words[0] | tag << 32, words[1], part.shape, part.slices))
    return _fractions(*_seed(words), tag, part.shape)


def random_offsets(words: tuple[Any, Any], part: RandomPart, span: int) -> jax.Array:
    """`philox.offsets` of the elements of a part, int32: JAX has no longer integers by default."""
    first = _first_row(part)
    return _offsets(*_seed(words), part.shape if first is None else _own_shape(part), span, first)


def _seed(words: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(words[0], jnp.uint32), jnp.asarray(words[1], jnp.uint32)


def _first_row(part: RandomPart) -> Any:
    """The row at which a part begins, where that is a scalar of the program; None for all other parts."""
    return part.slices[0].start if part.slices and isinstance(part.slices[0].start, Tracer) else None


def _own_shape(part: RandomPart) -> tuple[int, ...]:
    """The lengths of a part of which the first row is a scalar of the program."""
    assert part.rows is not None
    return (part.rows, *part.shape[1:])


def reorder(x: jax.Array, keys: jax.Array, axis: int) -> jax.Array:
    """`x` with its entries along an axis in the order of `keys` [length]."""
    return jnp.take(x, jnp.argsort(keys, stable=True), axis=axis)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _fractions(
    seed: jax.Array, stream: jax.Array, tag: int, shape: tuple[int, ...], first: jax.Array | None = None
) -> jax.Array:
    word = _words(seed, stream, tag, shape, first)
    return (word & philox.FRACTION_BITS).astype(jnp.float32) * np.float32(2.0**-23)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _offsets(
    seed: jax.Array, stream: jax.Array, shape: tuple[int, ...], span: int, first: jax.Array | None = None
) -> jax.Array:
    high, _ = _product(_words(seed, stream, 0, shape, first), span)
    return high.astype(jnp.int32)


def _words(
    seed: jax.Array, stream: jax.Array, tag: int, shape: tuple[int, ...], first: jax.Array | None = None
) -> jax.Array:
    """A random word for each element, uint32; `first`: the row in the batch of the first one here."""
    if not shape:
        return _words(seed, stream, tag, (1,))[0]
    lines = (*shape[:-1], philox.counters_of_line(shape[-1]))
    if np.prod(lines, dtype=np.float64) >= 2.0**32:
        raise FlowError(f"a random draw of shape {list(shape)} has more elements than the 2**34 that can be numbered")
    column = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    if first is not None and len(shape) == 1:
        column = column + first.astype(jnp.uint32)
    # the counter of an element is that of its line's beginning, plus one for every four columns
    counter, stride = column >> 2, lines[-1]
    for dim in reversed(range(len(shape) - 1)):
        counter = counter + lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(stride)
        stride *= shape[dim]
    if first is not None and len(shape) > 1:
        counter = counter + first.astype(jnp.uint32) * np.uint32(stride // shape[0])
    zero = jnp.zeros(shape, jnp.uint32)
    state, key = [counter, zero, zero + stream, zero], [seed, jnp.uint32(tag)]
    for _ in range(philox.ROUNDS):
        (first_high, first_low), (second_high, second_low) = (
            _product(state[place], multiplier)
            for place, multiplier in ((0, philox.MULTIPLIERS[0]), (2, philox.MULTIPLIERS[1]))
        )
        state = [second_high ^ state[1] ^ key[0], second_low, first_high ^ state[3] ^ key[1], first_low]
        key = [part + np.uint32(weyl) for part, weyl in zip(key, philox.WEYL, strict=True)]
    place = column & 3
    return jnp.where(place < 2, jnp.where(place == 0, *state[:2]), jnp.where(place == 2, *state[2:]))


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """High and low 32 bits of a product of 32-bit numbers, by 16-bit halves."""
    low, high = x & 0xFFFF, x >> 16
    factor_low, factor_high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    middle = high * factor_low + ((low * factor_low) >> 16)
    other = low * factor_high + (middle & 0xFFFF)
    return high * factor_high + (middle >> 16) + (other >> 16), x * np.uint32(factor)
