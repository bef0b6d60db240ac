"""Transforms along the last dims, on JAX: these dims are whole around them, and rows that are left over too.

XLA has wrong numbers in the windows of `extract_sequences` for one row on two data ranks, and its FFT on CPUs refuses
the order in memory that partitioning gives its operand where such a dim is split ("IsMonotonicWithDim0Major", jax
0.10.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from keras_flow.backends.jax.convolutions import distribution_of_step
from keras_flow.backends.jax.layouts import whole_on
from keras_flow.current.distribution import Distribution

#: function of `keras.src.backend.jax.math` -> along how many last dims of its argument, and of its result, it works
DIMS = {
    "extract_sequences": (1, 2),
    "fft": (1, 1),
    "fft2": (2, 2),
    "ifft2": (2, 2),
    "rfft": (1, 1),
    "irfft": (1, 1),
    "stft": (1, 2),
    "istft": (2, 1),
}


def distribution_of_transform(x: object, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on such functions, whose argument is an array or a pair of arrays."""
    return next((found for leaf in jax.tree.leaves(x) if (found := distribution_of_step(leaf)) is not None), None)


@functools.cache  # one replacement for each pair: what is installed is known by it
def along(before: int, after: int) -> Callable[..., Any]:
    """Hook on a function that works along the last dims of its argument and of its result."""

    def with_whole_dims(
        distribution: Distribution, original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook on transforms along the last dims: these dims are whole around them."""
        result = original(jax.tree.map(functools.partial(_whole, distribution, before), x), *args, **kwargs)
        return jax.tree.map(functools.partial(_whole, distribution, after), result)

    return with_whole_dims


def _whole(distribution: Distribution, count: int, value: Any) -> jax.Array:
    value = jax.numpy.asarray(value)
    divides = value.ndim > 0 and distribution.batch_plan(value.shape[0]).divides
    first = max(value.ndim - count, 0) if divides else 0
    return whole_on(value, range(first, value.ndim), distribution.placement)
