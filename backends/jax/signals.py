"""Fourier transforms on JAX: the dims along which they work are whole around them.

XLA's FFT on CPUs refuses the order in memory that partitioning gives the operand where such a dim is split
("IsMonotonicWithDim0Major", jax 0.10.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from keras_flow.backends.jax.convolution import in_a_step
from keras_flow.backends.jax.layouts import whole_on
from keras_flow.current.distribution import active

#: function of `keras.src.backend.jax.math` -> along how many last dims of its argument, and of its result, it works
DIMS = {
    "fft": (1, 1),
    "fft2": (2, 2),
    "ifft2": (2, 2),
    "rfft": (1, 1),
    "irfft": (1, 1),
    "stft": (1, 2),
    "istft": (2, 1),
}


def transforms_in_a_step(x: object, *args: object, **kwargs: object) -> bool:
    """Condition: such a function of a step that is traced; its argument is an array or a pair of arrays."""
    return any(in_a_step(leaf) for leaf in jax.tree.leaves(x))


@functools.cache  # one replacement for each pair: what is installed is known by it
def along(before: int, after: int) -> Callable[..., Any]:
    """Hook on a function that works along the last dims of its argument and of its result."""
    return functools.partial(_with_whole_dims, before, after)


def _with_whole_dims(before: int, after: int, original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(jax.tree.map(functools.partial(_whole, before), x), *args, **kwargs)
    return jax.tree.map(functools.partial(_whole, after), result)


def _whole(count: int, value: Any) -> jax.Array:
    distribution = active()
    assert distribution is not None  # the hook's condition
    value = jax.numpy.asarray(value)
    last = range(max(value.ndim - count, 0), value.ndim)
    return whole_on(value, last, distribution.placement)
