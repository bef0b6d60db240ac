"""Transforms along the last dims, on JAX: these dims are whole around them, and windows of rows left over too.

XLA's FFT on CPUs refuses an operand that is not row-major in memory ("IsMonotonicWithDim0Major", jax 0.10.2), and takes
what partitioning gives it; XLA has wrong numbers in the windows of `extract_sequences` for one row on two data ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec

from keras_flow.backends.jax.convolution import in_a_step
from keras_flow.backends.jax.layouts import mesh, whole_on
from keras_flow.current.distribution import active

#: function of `keras.src.backend.jax.math` -> along how many last dims of its argument, and of its result, it works
WINDOWS = {"extract_sequences": (1, 2), "stft": (1, 2), "istft": (2, 1)}


def windows_in_a_step(x: object, *args: object, **kwargs: object) -> bool:
    """Condition: such a function of a step that is traced; its argument is an array or a pair of arrays."""
    return any(in_a_step(leaf) for leaf in jax.tree.leaves(x))


@functools.cache  # one replacement for each pair: what is installed is known by it
def along(before: int, after: int) -> Callable[..., Any]:
    """Hook on a function that works along the last dims of its argument and of its result."""

    def with_whole_dims(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(jax.tree.map(functools.partial(_whole, before), x), *args, **kwargs)
        return jax.tree.map(functools.partial(_whole, after), result)

    return with_whole_dims


def transform_in_a_step(x: object, *args: object, **kwargs: object) -> bool:
    """Condition: a transform of a step that is traced, and not inside a rank's own program (the gradient of one is)."""
    return in_a_step(x) and not jax.sharding.get_abstract_mesh().manual_axes


def row_major(original: Callable[..., jax.Array], x: jax.Array, kind: Any, lengths: Sequence[int]) -> jax.Array:
    """Hook on `jax.lax.fft`: each rank transforms its own rows, operand and result row-major in memory.

    The result too, because its gradient is the operand of the transform back.

    Args:
        original: JAX's function.
        x: tensor [..., *dims], complex except for a real transform; dim 0 has the rows, unless it is transformed.
        kind: which transform.
        lengths: of the transformed dims, the last ones.
    """
    distribution = active()
    assert distribution is not None  # the hook's condition
    divides = x.ndim > len(lengths) and distribution.batch_plan(x.shape[0]).divides
    rows = PartitionSpec(distribution.batch_axes or None) if divides else PartitionSpec()

    def settled(value: jax.Array) -> jax.Array:
        return with_layout_constraint(value, MemoryLayout(tuple(range(value.ndim))))

    transform = jax.shard_map(
        lambda own: settled(original(settled(own), kind, lengths)),
        mesh=mesh(distribution.placement),
        in_specs=rows,
        out_specs=rows,
    )
    return transform(x)


def _whole(count: int, value: Any) -> jax.Array:
    distribution = active()
    assert distribution is not None  # the hook's condition
    value = jax.numpy.asarray(value)
    divides = value.ndim > 0 and distribution.batch_plan(value.shape[0]).divides
    first = max(value.ndim - count, 0) if divides else 0
    return whole_on(value, range(first, value.ndim), distribution.placement)
