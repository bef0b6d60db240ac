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

_AXIS = "ranks"
_NATIVE = {"sum": lax.psum, "min": lax.pmin, "max": lax.pmax}
#: bytes up to which a broadcast is a tree, whose source sends the tensor log2(n) times, but in one program
_BY_TREE = 1 << 21
_FOLDS = {"sum": jnp.sum, "min": jnp.min, "max": jnp.max, "product": jnp.prod}


def is_array(value: object, rank: int) -> bool:
    """An array with values, on the one device of the rank."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.device == rank_devices()[rank]


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
    """XLA's all-reduce, except for products; and broadcasts, which XLA has not on CPUs, of small arrays."""
    value = next(iter(values.values()))
    found = _one_program(kind, ranks, value, how)
    if found is None:
        return None
    program, place = found
    flat = _run(program, ranks, {rank: reshape(each, (-1,)) for rank, each in values.items()}, place)
    return Pending(lambda: {rank: reshape(each, value.shape) for rank, each in flat.items()})


def direct(
    call: str, ranks: tuple[int, ...], like: jax.Array, how: str | int
) -> Callable[[jax.Array], jax.Array] | None:
    """One program on arrays as they are: scalars have no dim to lie along."""
    found = ("all_gather", 0) if call == "all_gather_into_tensor" else _one_program(call, ranks, like, how)
    if found is None or not like.ndim or not like.size:
        return None
    run, sharding = _program(found[0], ranks, found[1])
    whole = (len(ranks) * like.shape[0], *like.shape[1:])
    place = jax.make_array_from_single_device_arrays
    return lambda value: run(place(whole, sharding, [value])).addressable_data(0)


def _one_program(kind: str, ranks: tuple[int, ...], value: jax.Array, how: str | int) -> tuple[str, int] | None:
    """The kind and place of `_program` that does an all-reduce or a broadcast, where one does."""
    if not value.size:
        return None
    if kind == "broadcast":
        return (kind, ranks.index(int(how))) if value.nbytes <= _BY_TREE or len(ranks) == 2 else None
    return (str(how), 0) if how in _NATIVE and value.dtype.kind not in "bc" else None


@functools.partial(jax.jit, static_argnames="op")
def fold(rows: jax.Array, op: str) -> jax.Array:
    """Rows [ranks, elements] as one, in their dtype."""
    if rows.dtype == bool:
        return jnp.any(rows, 0) if op in ("sum", "max") else jnp.all(rows, 0)
    if op in ("min", "max"):
        return _FOLDS[op](rows, axis=0)
    return _FOLDS[op](rows, axis=0, dtype=rows.dtype)


def reshape(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """In another shape."""
    # jax compiles and runs a program for a shape that is the same, too
    return value if value.shape == shape or (value.ndim == 1 and shape == (-1,)) else value.reshape(shape)


def join(flat: Sequence[jax.Array]) -> jax.Array:
    """One after the other."""
    return jnp.concatenate(flat)


def shape(value: jax.Array) -> tuple[int, ...]:
    """As it is."""
    return value.shape


def is_recorded(values: Sequence[jax.Array]) -> bool:
    """Whether one is a tracer, of `jax.grad` or of a program: those of a program `_known` refuses."""
    return any(isinstance(value, Tracer) for value in values)


def with_gradient(
    forward: Callable[[Sequence[Any]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """By `jax.custom_vjp`, whose two functions run with values, outside of `jax.jit`."""
    function = jax.custom_vjp(lambda *given: tuple(forward(_known(given))))
    function.defvjp(
        lambda *given: (tuple(forward(_known(given))), None),
        lambda _, cotangents: tuple(backward(_known(cotangents))),
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


def _known(values: Sequence[Any]) -> Sequence[Any]:
    if any(isinstance(value, Tracer) for value in values):
        raise FlowError(
            "kf.comm is called inside jax.jit (or vmap, scan), where ranks have no values yet. Call it outside of the "
            "compiled function; inside, jax.lax.psum and its like do the same under jax.shard_map"
        )
    return values


def _run(kind: str, ranks: tuple[int, ...], values: Mapping[int, jax.Array], place: int = 0) -> dict[int, jax.Array]:
    """A program on flat arrays of one length; `place` is what each kind makes of it in `_program`."""
    devices = rank_devices()
    blocks = list(_known(list(values.values())))
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
def _program(kind: str, ranks: tuple[int, ...], place: int):
    """The compiled program of a collective, and how its argument lies."""
    mesh = Mesh(np.array([rank_devices()[rank] for rank in ranks]), (_AXIS,))
    spec = PartitionSpec(_AXIS)

    def body(block: jax.Array) -> jax.Array:
        if kind == "all_to_all":
            return lax.all_to_all(block.reshape(len(ranks), -1), _AXIS, 0, 0).reshape(-1)
        if kind == "all_gather":
            return lax.all_gather(block, _AXIS, tiled=True)
        if kind == "permute":
            return lax.ppermute(block, _AXIS, [(one, (one + place) % len(ranks)) for one in range(len(ranks))])
        if kind == "broadcast":
            return _by_tree(block, len(ranks), place)
        return _NATIVE[kind](block, _AXIS)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return run, NamedSharding(mesh, spec)


def _by_tree(block: jax.Array, count: int, source: int) -> jax.Array:
    """A broadcast by the binomial tree: in each round all who have the array send it to one who has not."""
    turn = (lax.axis_index(_AXIS) - source) % count
    have = 1
    while have < count:
        pairs = [((source + one) % count, (source + one + have) % count) for one in range(min(have, count - have))]
        received = lax.ppermute(block, _AXIS, pairs)
        block = jnp.where((turn >= have) & (turn < 2 * have), received, block)
        have *= 2
    return block
