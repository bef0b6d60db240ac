"""`kf.comm` on JAX: compiled `shard_map` programs over the devices of a group; a process runs those of its own ranks.

An exchange of equal parts is XLA's all-to-all. Another one goes in rounds: in round k each member sends to the k-th
after it, so that members without a part for one another send nothing. A round's messages are padded to its longest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_flow.backends.collective_engine import Counts, Pending
from keras_flow.backends.jax.devices import rank_devices
from keras_flow.errors import FlowError

#: of the mesh of a group
AXIS = "ranks"
_NATIVE = {"sum": lax.psum, "min": lax.pmin, "max": lax.pmax}
#: bytes up to which a broadcast is a tree, whose source sends the tensor log2(n) times, but in one program
_BY_TREE = 1 << 21
_FOLDS = {"sum": jnp.sum, "min": jnp.min, "max": jnp.max, "product": jnp.prod}


def key_of(value: object, rank: int) -> tuple[Any, ...] | None:
    """Return dtype and shape of an array that has values, on the one device of the rank."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.device != rank_devices()[rank]:
        return None
    return value.dtype, value.shape


def exchange(ranks: tuple[int, ...], values: Mapping[int, jax.Array], counts: Counts) -> Pending:
    """An all-to-all, or rounds."""
    table, mine = counts.table, list(values)
    if counts.is_even:
        arrived = _run("all_to_all", ranks, values)
        return Pending(lambda: arrived)
    cut: dict[int, tuple[jax.Array, ...]] = {}
    for rank in mine:
        # a rank's parts in the order of the rounds; round 0 is what it keeps
        place, count = ranks.index(rank), len(ranks)
        starts = [0, *np.cumsum(table[place])]
        to = [(place + shift) % count for shift in range(count)]
        bounds = tuple((int(starts[other]), table[place][other]) for other in to)
        padded = tuple(table[place][place] if shift == 0 else counts.longest[shift] for shift in range(count))
        cut[rank] = _cut(values[rank], bounds, padded)
    got: dict[int, list[jax.Array]] = {rank: [parts[0]] for rank, parts in cut.items()}
    for shift in range(1, len(ranks)):
        sent = {rank: parts[shift] for rank, parts in cut.items()}
        arrived = _run("permute", ranks, sent, shift) if counts.longest[shift] else sent
        for rank in mine:
            got[rank].append(arrived[rank])
    joined = {}
    for rank in mine:
        place = ranks.index(rank)
        # from the sender of round k, k places before; in the order of senders
        order = tuple((place - sender) % len(ranks) for sender in range(len(ranks)))
        joined[rank] = _assembled(got[rank], order, tuple(row[place] for row in table))
    return Pending(lambda: joined)


def gather_all(ranks: tuple[int, ...], values: Mapping[int, jax.Array], counts: Sequence[int]) -> Pending:
    """XLA's all-gather, of arrays padded to the longest."""
    size = max(counts)
    if size == 0:
        return Pending(lambda: dict(values))
    padded = {
        rank: jnp.pad(value, (0, size - value.size)) if value.size < size else value for rank, value in values.items()
    }
    got = _run("all_gather", ranks, padded)
    if min(counts) < size:
        got = {rank: _without_padding(value, size, tuple(counts)) for rank, value in got.items()}
    return Pending(lambda: got)


def native(kind: str, ranks: tuple[int, ...], values: Mapping[int, jax.Array], how: str | int) -> Pending | None:
    """All-reduces, and broadcasts of small arrays."""
    value = next(iter(values.values()))
    if not value.size or (kind == "broadcast" and not goes_by_tree(value, len(ranks))):
        return None
    place = ranks.index(int(how)) if kind == "broadcast" else how
    flat = _run(kind, ranks, {rank: reshape(each, (-1,)) for rank, each in values.items()}, place)
    return Pending(lambda: {rank: reshape(each, value.shape) for rank, each in flat.items()})


def goes_by_tree(value: jax.Array, count: int) -> bool:
    """Whether an array is broadcast by `by_tree`, whose source sends it log2(n) times."""
    return value.nbytes <= _BY_TREE or count == 2


@functools.partial(jax.jit, static_argnames="op")
def fold(rows: jax.Array, op: str) -> jax.Array:
    """Rows [ranks, elements] as one, in their dtype."""
    if rows.dtype == bool:
        return jnp.any(rows, 0) if op in ("sum", "max") else jnp.all(rows, 0)
    if op in ("min", "max"):
        return _FOLDS[op](rows, axis=0)
    return _FOLDS[op](rows, axis=0, dtype=rows.dtype)


def reshape(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the array in another shape."""
    # jax compiles and runs a program for a shape that is the same, too
    return value if value.shape == shape or (value.ndim == 1 and shape == (-1,)) else value.reshape(shape)


def join(flat: Sequence[jax.Array]) -> jax.Array:
    """Join flat arrays, one after the other."""
    return jnp.concatenate(flat)


def shape(value: jax.Array) -> tuple[int, ...]:
    """Return the shape, which is a tuple of numbers."""
    return value.shape


def without_gradient(value: jax.Array) -> jax.Array:
    """A tracer has no values to go on with."""
    return known([value])[0]


def is_recorded(values: Sequence[jax.Array]) -> bool:
    """Whether one is a tracer, of `jax.grad` or of a program: those of a program `known` refuses."""
    return any(isinstance(value, Tracer) for value in values)


def with_gradient(
    forward: Callable[[Sequence[Any]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """Use `jax.custom_vjp`, whose two functions run with values, outside of `jax.jit`."""
    function = jax.custom_vjp(lambda *given: tuple(forward(known(given))))
    function.defvjp(
        lambda *given: (tuple(forward(known(given))), None),
        lambda _, cotangents: tuple(backward(known(cotangents))),
    )
    return list(function(*values))


@functools.partial(jax.jit, static_argnames=("bounds", "sizes"))
def _cut(flat: jax.Array, bounds: tuple[tuple[int, int], ...], sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Parts of an array: start and length, padded to a size."""
    return tuple(
        jnp.pad(flat[start : start + length], (0, size - length))
        for (start, length), size in zip(bounds, sizes, strict=True)
    )


@functools.partial(jax.jit, static_argnames=("order", "sizes"))
def _assembled(parts: list[jax.Array], order: tuple[int, ...], sizes: tuple[int, ...]) -> jax.Array:
    """Padded parts in another order, one after the other."""
    return jnp.concatenate([parts[place][:size] for place, size in zip(order, sizes, strict=True)])


@functools.partial(jax.jit, static_argnames=("size", "counts"))
def _without_padding(joined: jax.Array, size: int, counts: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate([joined[place * size : place * size + count] for place, count in enumerate(counts)])


def known(values: Sequence[Any]) -> Sequence[Any]:
    """Arrays that have values.

    Raises:
        FlowError: they have none.
    """
    if any(isinstance(value, Tracer) for value in values):
        raise FlowError(
            "kf.comm is called inside jax.jit (or vmap, scan), where ranks have no values yet. Call it outside of the "
            "compiled function; inside, jax.lax.psum and its like do the same under jax.shard_map"
        )
    return values


def _run(kind: str, ranks: tuple[int, ...], values: Mapping[int, jax.Array], place: Any = 0) -> dict[int, jax.Array]:
    """A program on flat arrays of one length; `place` is what each kind makes of it in `_program`."""
    devices = rank_devices()
    blocks = list(known(list(values.values())))
    run, sharding = _program(kind, ranks, place)
    for at, rank in enumerate(values):
        if blocks[at].device != devices[rank]:
            blocks[at] = jax.device_put(blocks[at], devices[rank])
    whole = jax.make_array_from_single_device_arrays((len(ranks) * blocks[0].size,), sharding, blocks)
    if len(blocks) == 1:
        return {rank: run(whole).addressable_data(0) for rank in values}
    got = {shard.device: shard.data for shard in run(whole).addressable_shards}
    return {rank: got[devices[rank]] for rank in values}


@functools.lru_cache(maxsize=1024)
def _program(kind: str, ranks: tuple[int, ...], place: Any):
    """The compiled program of a collective, and how its argument lies."""

    def body(block: jax.Array) -> jax.Array:
        if kind == "all_to_all":
            return lax.all_to_all(block.reshape(len(ranks), -1), AXIS, 0, 0).reshape(-1)
        if kind == "all_gather":
            return lax.all_gather(block, AXIS, tiled=True)
        if kind == "permute":
            return lax.ppermute(block, AXIS, [(one, (one + place) % len(ranks)) for one in range(len(ranks))])
        if kind == "broadcast":
            return by_tree(block, len(ranks), place)
        return all_reduced(block, str(place), len(ranks))

    return compiled(body, ranks)


def compiled(body: Callable[..., Any], ranks: tuple[int, ...]) -> tuple[Callable[..., Any], NamedSharding]:
    """A program that each rank of a group runs on its block, and how what it is given lies."""
    mesh = Mesh(np.array([rank_devices()[rank] for rank in ranks]), (AXIS,))
    spec = PartitionSpec(AXIS)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return run, NamedSharding(mesh, spec)


def all_reduced(block: jax.Array, op: str, count: int) -> jax.Array:
    """XLA's all-reduce; of what it does not reduce, parts that are exchanged, reduced by `fold` and gathered."""
    if op in _NATIVE and block.dtype.kind not in "bc":
        return _NATIVE[op](block, AXIS)
    padded = jnp.pad(block.reshape(-1), (0, -block.size % count)).reshape(count, -1)
    reduced = fold(lax.all_to_all(padded, AXIS, 0, 0), op)
    return lax.all_gather(reduced, AXIS, tiled=True)[: block.size].reshape(block.shape)


def by_tree(block: jax.Array, count: int, source: int) -> jax.Array:
    """A broadcast by the binomial tree: in each round all who have the array send it to one who has not."""
    turn = (lax.axis_index(AXIS) - source) % count
    have = 1
    while have < count:
        pairs = [((source + one) % count, (source + one + have) % count) for one in range(min(have, count - have))]
        received = lax.ppermute(block, AXIS, pairs)
        block = jnp.where((turn >= have) & (turn < 2 * have), received, block)
        have *= 2
    return block
