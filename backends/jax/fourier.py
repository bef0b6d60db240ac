"""Fourier transforms and windows of signals, on JAX: the dims along which they work are not split.

XLA's FFT on CPUs refuses an operand that is not row-major in memory ("IsMonotonicWithDim0Major", jax 0.10.2), and the
partitioner gives it others; XLA has wrong numbers in the windows of `extract_sequences` for one row on two data ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec

from keras_flow.backends.hooking import hook
from keras_flow.backends.jax.convolutions import distribution_of_step
from keras_flow.backends.jax.layouts import mesh, whole_on
from keras_flow.current.distribution import Distribution


def distribution_of_windows(x: object, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on such functions, whose argument is an array or a pair of arrays."""
    return next(filter(None, map(distribution_of_step, jax.tree.leaves(x))), None)


@hook(
    "keras:math",
    ("extract_sequences", "stft", "istft"),
    "XLA has wrong windows for rows left over",
    when=distribution_of_windows,
)
def with_unsplit_dims(
    distribution: Distribution, original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook on functions of windows: neither the last dims of the argument nor those of the result are split.

    A signal has one such dim, its windows have two.
    """
    before, after = (2, 1) if original.__name__ == "istft" else (1, 2)
    # complex signals are pairs of arrays, real part and imaginary part
    x = jax.tree.map(functools.partial(_unsplit, distribution, range(-before, 0)), x)
    result = original(x, *args, **kwargs)
    return jax.tree.map(functools.partial(_unsplit, distribution, range(-after, 0)), result)


def _unsplit(distribution: Distribution, dims: Collection[int], value: Any) -> jax.Array:
    """The value with these dims gathered (-1 is the last one); where its rows do not divide, with all of them."""
    value = jax.numpy.asarray(value)
    # rows that do not divide are padded where they are split, and windows would count the padding
    divides = value.ndim > 0 and distribution.batch_plan(value.shape[0]).divides
    chosen = {dim % value.ndim for dim in dims if dim >= -value.ndim} if divides else range(value.ndim)
    return whole_on(value, chosen, distribution.placement)


def distribution_of_scan(f: object, elems: object, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `associative_scan`: the distribution of the step that its elements are in."""
    return distribution_of_windows(elems)


@hook(
    "keras:core",
    "associative_scan",
    "XLA pads even and odd elements wrongly where ranks do not ascend along the mesh",
    when=distribution_of_scan,
)
def associative_scan(
    distribution: Distribution,
    original: Callable[..., Any],
    f: Callable[..., Any],
    elems: Any,
    reverse: bool = False,
    axis: int = 0,
) -> Any:
    """Hook on `associative_scan`: the dim along which it works is not split, before and after."""
    unsplit = functools.partial(_unsplit, distribution, [axis])
    return jax.tree.map(unsplit, original(f, jax.tree.map(unsplit, elems), reverse=reverse, axis=axis))


# all of jax.numpy.fft and jax.scipy.signal call it by this module, not as jax.lax.fft
@hook(
    "jax._src.lax.fft",
    "fft",
    "XLA's FFT on CPUs fails on an operand of another order in memory, which partitioning may give it",
    when=distribution_of_step,
    also=("jax.lax:fft",),
)
def transform(
    distribution: Distribution,
    original: Callable[..., jax.Array],
    x: jax.Array,
    kind: Any,
    lengths: Sequence[int],
) -> jax.Array:
    """Hook on `jax.lax.fft`: each rank transforms its own rows, operand and result row-major in memory.

    The result too, because its gradient is the operand of the transform back. Dim 0 of `x` has the rows, unless it is
    among the last ones, which are transformed.
    """
    divides = x.ndim > len(lengths) and distribution.batch_plan(x.shape[0]).divides
    # rows left over: every rank transforms all of them
    rows = PartitionSpec(distribution.batch_axes or None) if divides else PartitionSpec()

    def row_major(value: jax.Array) -> jax.Array:
        return with_layout_constraint(value, MemoryLayout(tuple(range(value.ndim))))

    # own rows, in a program of the rank's own: nothing is left to the partitioner
    by_rank = jax.shard_map(
        lambda own: row_major(original(row_major(own), kind, lengths)),
        mesh=mesh(distribution.placement),
        in_specs=rows,
        out_specs=rows,
    )
    return by_rank(x)
