"""Calls of `kf.comm` that were made before, each as one compiled program that takes the arrays as they are.

An SPMD program has one shape on all ranks. So a rank that has nothing to send passes zeros, and a rank that has nothing
to receive ignores its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from keras_flow.backends.collective_engine import LISTED, roles
from keras_flow.backends.jax.collectives import (
    AXIS,
    all_reduced,
    by_tree,
    compiled,
    fold,
    goes_by_tree,
    known,
)
from keras_flow.backends.jax.devices import rank_devices, world

#: bytes up to which zeros are kept, of the last two shapes
_KEPT = 1 << 24


def direct(
    call: str, ranks: tuple[int, ...], like: jax.Array | list[jax.Array], how: tuple[Any, ...], async_op: bool
) -> Callable[[Any], Any] | None:
    """Make the function for arrays of one shape that have elements. JAX runs ahead by itself."""
    given = like if isinstance(like, list) else [like]
    first, rank = given[0], world().local_ranks[0]
    if not first.size or len({each.shape for each in given}) > 1:
        return None
    if call == "broadcast" and not goes_by_tree(first, len(ranks)):
        return None
    gives, gets = roles(call, rank, how)
    program, facts = {
        # XLA has nothing that reduces to one rank
        "reduce": ("all_reduce", how[:1]),
        "barrier": ("all_reduce", ("sum",)),
        "send": ("message", (rank, *how)),
        "recv": ("message", (*how, rank)),
    }.get(call, (call, how))
    run, sharding = _program(program, ranks, facts)
    is_scalar, is_listed = not first.ndim, isinstance(like, list)
    # scalars have no dim to lie along
    shape, dtype, device = first.shape or (1,), first.dtype, rank_devices()[rank]
    whole = (len(ranks) * shape[0], *shape[1:])
    place = jax.make_array_from_single_device_arrays
    blanks = len(ranks) if call == "scatter" else 1

    def placed(value: jax.Array) -> jax.Array:
        if value.device != device:
            value = jax.device_put(value, device)
        return place(whole, sharding, [_as_vector(value) if is_scalar else value])

    def taken(result: jax.Array) -> jax.Array:
        local = result.addressable_data(0)
        return _as_scalar(local) if is_scalar and local.shape == (1,) else local

    def run_on(value: Any) -> Any:
        if gives:
            blocks = [placed(each) for each in (value if is_listed else [value])]
        else:
            blocks = [place(whole, sharding, [_blank(shape, dtype, device)])] * blanks
        results = known(run(*blocks))  # arrays with values, too, would become a part of a program that is traced
        if call == "barrier":
            results[0].block_until_ready()  # jax runs ahead
        if not gets:
            return value if call == "reduce" else None
        return [taken(each) for each in results] if call in LISTED else taken(results[0])

    return run_on


@functools.lru_cache(maxsize=1024)
def _program(kind: str, ranks: tuple[int, ...], how: tuple[Any, ...]) -> tuple[Callable[..., Any], NamedSharding]:
    """The compiled program of a call, from blocks to a tuple of blocks, and how they lie.

    Args:
        kind: the call, or `"message"`, where `how` is source and target.
        ranks: the group.
        how: as in `direct`.
    """
    count = len(ranks)
    bodies: dict[str, Callable[..., Sequence[jax.Array]]] = {
        "all_reduce": lambda x: [all_reduced(x, how[0], count)],
        "all_gather_into_tensor": lambda x: [lax.all_gather(x, AXIS, tiled=True)],
        "all_gather": lambda x: tuple(lax.all_gather(x, AXIS)),
        "broadcast": lambda x: [by_tree(x, count, ranks.index(how[0]))],
        "reduce_scatter_tensor": lambda x: [_reduced(x.reshape(count, -1, *x.shape[1:]), how[0])],
        "reduce_scatter": lambda *parts: [_reduced(jnp.stack(parts), how[0])],
        "all_to_all": lambda *parts: tuple(lax.all_to_all(jnp.stack(parts), AXIS, 0, 0)),
        "gather": lambda x: [_sent(x, rank, how[0], ranks) for rank in ranks],
        "scatter": lambda *parts: [_scattered(parts, ranks, how[0])],
        "message": lambda x: [_sent(x, how[0], how[1], ranks)],
    }
    return compiled(lambda *blocks: tuple(bodies[kind](*blocks)), ranks)


def _reduced(rows: jax.Array, op: str) -> jax.Array:
    """Each rank's row of all, added up as `fold` does."""
    return fold(lax.all_to_all(rows, AXIS, 0, 0), op)


def _sent(block: jax.Array, source: int, target: int, ranks: tuple[int, ...]) -> jax.Array:
    """Send the block of one rank to another; return it as it is where both are the same rank."""
    return block if source == target else lax.ppermute(block, AXIS, [(ranks.index(source), ranks.index(target))])


def _scattered(parts: Sequence[jax.Array], ranks: tuple[int, ...], source: int) -> jax.Array:
    """Each rank's part of those of one rank."""
    own = parts[ranks.index(source)]
    for place, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
        if rank != source:
            own = jnp.where(lax.axis_index(AXIS) == place, _sent(part, source, rank, ranks), own)
    return own


def _blank(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> jax.Array:
    """The array that a rank passes to a collective when it has nothing to send."""
    make = _kept if np.prod(shape) * dtype.itemsize <= _KEPT else _zeros
    return make(shape, dtype, device)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> jax.Array:
    return known([jnp.zeros(shape, dtype, device=device)])[0]


_kept = functools.lru_cache(maxsize=2)(_zeros)


@jax.jit
def _as_vector(value: jax.Array) -> jax.Array:
    return value.reshape(1)


@jax.jit
def _as_scalar(value: jax.Array) -> jax.Array:
    return value.reshape(())
