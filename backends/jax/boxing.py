"""Boxing on JAX: one compiled `shard_map` program for each plan.

The named collectives on shards of one shape are XLA's own, over the axes of the placement. Everything else goes in
rounds of `ppermute`: in one round each rank sends and receives one message at most, all of one size, so that nothing is
padded on its way. Where shards are of one shape, ranks differ only in where their pieces start, which they look up by
their place. Shards of different shapes are held in flat buffers, padded to the largest; there all that differs between
ranks is a branch of a `switch` on the rank's place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_flow.backends.jax.devices import rank_devices
from keras_flow.backends.jax.rounds import Pairs, elements, is_alike, likeness, rounds, summed_blocks
from keras_flow.boxing.cells import volume
from keras_flow.boxing.chains import by_collectives
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.pieces import WRITES, Piece, Transfer, whole
from keras_flow.boxing.simulate import local_slices
from keras_flow.boxing.spec import BoxingPlan, Step
from keras_flow.layout import Layout
from keras_flow.sbp import Split


def redistribute(plan: BoxingPlan, shards: Mapping[int, jax.Array]) -> Mapping[int, jax.Array]:
    """Run a plan; shards by rank, all ranks of this host."""
    if not plan.steps:
        return shards
    made = program(plan, rank_devices())
    return Shards(plan.target, made.run(made.given(shards)))


class Shards(Mapping[int, jax.Array]):
    """The shards that a program left in one array; they are split off when they are asked for, not for the next plan.

    Attributes:
        layout: what these are shards of.
        array: the blocks of all ranks of a program, one after the other along dim 0.
    """

    def __init__(self, layout: Layout, array: jax.Array):
        self.layout, self.array = layout, array

    @functools.cached_property
    def _of_rank(self) -> dict[int, jax.Array]:
        devices = rank_devices()
        blocks = {shard.device: shard.data for shard in self.array.addressable_shards}
        return {rank: _unpadded(blocks[devices[rank]], self.layout.local_shape(rank)) for rank in self}

    def __getitem__(self, rank: int) -> jax.Array:
        return self._of_rank[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout.placement.ranks)

    def __len__(self) -> int:
        return len(self.layout.placement.ranks)

    def block_until_ready(self) -> Shards:
        """As that of a `jax.Array`."""
        self.array.block_until_ready()
        return self


class _Program:
    """The compiled program of a plan. It takes and gives one array whose dim 0 is cut over all ranks.

    Where all ranks hold shards of one shape these are the blocks of that array as they are; else a block is a shard
    laid flat and padded to the largest.
    """

    def __init__(self, plan: BoxingPlan, devices: tuple):
        self.plan, self.devices = plan, devices
        self.steps = by_collectives(plan).steps
        self.place = {rank: place for place, rank in enumerate(plan.ranks)}
        self.source_block = _block(plan, plan.source)
        #: shape of the array that it takes
        self.shape_of_all = (len(plan.ranks) * self.source_block[0], *self.source_block[1:])
        self.target_block = _block(plan, plan.target)
        placement = plan.source.placement
        #: whether named collectives can go over the axes of the placement; else all ranks lie on one
        self.on_axes = plan.ranks == placement.ranks and all(
            step.exchange.same_placement or is_alike(step) for step in self.steps
        )
        hierarchy = placement.hierarchy if self.on_axes else (len(plan.ranks),)
        self.axes = placement.axis_names if self.on_axes else ("ranks",)
        mesh = Mesh(np.array([devices[rank] for rank in plan.ranks]).reshape(hierarchy), self.axes)
        spec = PartitionSpec(self.axes)
        self.sharding = NamedSharding(mesh, spec)
        self.run = jax.jit(jax.shard_map(self._body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        self._compiled: dict = {}

    def given(self, shards: Mapping[int, jax.Array]) -> jax.Array:
        """The array that it takes, of the shards of all ranks."""
        if isinstance(shards, Shards):
            array = shards.array
            if array.shape == self.shape_of_all and array.sharding == self.sharding:
                return array
        like = next(iter(shards.values()))
        blocks = [self._block_of(rank, shards.get(rank), like) for rank in self.plan.ranks]
        return jax.make_array_from_single_device_arrays(self.shape_of_all, self.sharding, blocks)

    def _block_of(self, rank: int, shard: jax.Array | None, like: jax.Array) -> jax.Array:
        """The block of a rank."""
        if shard is not None and shard.shape == self.source_block:
            here = self.devices[rank]
            return shard if shard.devices() == {here} else jax.device_put(shard, here)
        (size,) = self.source_block
        values = np.zeros(0, like.dtype) if shard is None else shard.reshape(-1)
        return jax.device_put(jnp.pad(values, (0, size - values.size)), self.devices[rank])

    def compiled(self, dtype):
        """The executable for one dtype; its `as_text()` shows the collectives."""
        dtype = np.dtype(dtype)
        if dtype not in self._compiled:
            like = jax.ShapeDtypeStruct(self.shape_of_all, dtype, sharding=self.sharding)
            self._compiled[dtype] = self.run.lower(like).compile()
        return self._compiled[dtype]

    def _body(self, block: jax.Array) -> jax.Array:
        held = block.reshape(-1)
        if block.dtype == bool:
            held = held.astype(jnp.uint8)  # pieces are added
        for step in self.steps:
            if self.on_axes and _is_native(step):
                held = self._native(step, held)
            elif self.on_axes and summed_blocks(step) is not None:
                held = self._scattered(step, held)
            else:
                held = self._exchange(step, held)
        return held.reshape(self.target_block).astype(block.dtype)

    def _native(self, step: Step, held: jax.Array) -> jax.Array:
        """One of XLA's own collectives; all shards have one shape.

        They work on dim 0, into which blocks are brought: along another dim XLA's CPU collectives are slow.
        """
        source, target = step.exchange.source, step.exchange.target
        values = held.reshape(source.local_shape(source.placement.ranks[0]))
        changed = [axis for axis in range(source.placement.ndim) if axis not in step.exchange.apart]
        names = tuple(source.placement.axis_names[axis] for axis in changed)
        sizes = [source.placement.hierarchy[axis] for axis in changed]
        if step.kind == "all_reduce":
            values = lax.psum(values, names)
        if step.kind == "all_gather":
            blocks = lax.all_gather(values, names).reshape(*sizes, *values.shape)
            values = _joined(blocks, [_dim(source, axis) for axis in changed])
        if step.kind == "reduce_scatter":
            dims = [_dim(target, axis) for axis in changed]
            if sizes == [2] and dims != [0]:
                values = _halved(values, dims[0], names[0])
            else:
                blocks = _parted(values, dims, sizes)
                values = lax.psum_scatter(blocks.reshape(-1, *blocks.shape[len(sizes) :]), names)
        if step.kind == "all_to_all":
            (axis,) = changed
            blocks = lax.all_to_all(_parted(values, [_dim(target, axis)], sizes), names, 0, 0)
            values = _joined(blocks, [_dim(source, axis)])
        if step.kind == "permute":  # some ranks may keep their shard
            senders = [next(iter(step.exchange.receives(rank, "move"))).sender for rank in self.plan.ranks]
            values = lax.ppermute(values, self.axes, [(self.place[one], place) for place, one in enumerate(senders)])
        return values.reshape(-1)

    def _scattered(self, step: Step, held: jax.Array) -> jax.Array:
        """Sums made by a reduce-scatter of blocks that are looked up, and sent on where they were made elsewhere."""
        exchange, ranks = step.exchange, self.plan.ranks
        sums = summed_blocks(step)
        assert sums is not None
        values = held.reshape(exchange.source.local_shape(ranks[0]))
        me = lax.axis_index(self.axes)
        blocks = []
        for number in range(exchange.of_source.classes):
            pieces = {rank: self._shard_of(exchange, wanted[number]) for group, wanted in sums for rank in group}
            blocks.append(_read(values, pieces[ranks[0]], self._starts(exchange.source, pieces)[me]))
        names = tuple(exchange.source.placement.axis_names[axis] for axis in exchange.of_source.class_axes)
        values = lax.psum_scatter(jnp.stack(blocks), names)
        pairs = [pair for group, wanted in sums for pair in zip(group, wanted, strict=True)]
        if any(one != other for one, other in pairs):
            values = lax.ppermute(values, self.axes, [(self.place[one], self.place[other]) for one, other in pairs])
        return values

    @staticmethod
    def _shard_of(exchange: Exchange, rank: int) -> Piece:
        """What a rank wants, as a piece of the logical tensor."""
        return whole(exchange.of_target.box_at(exchange.of_target.coords_of(rank)))

    def _exchange(self, step: Step, held: jax.Array) -> jax.Array:
        buffers = {"source": held}
        me = lax.axis_index(self.axes)
        written: set[tuple[str, int, Piece]] = set()
        for phase in step.phases:
            self._phase(step, phase, buffers, me, written)
        return buffers["result"]

    def _phase(
        self, step: Step, phase: str, buffers: dict[str, jax.Array], me, written: set[tuple[str, int, Piece]]
    ) -> None:
        """`written`: the pieces of buffers and ranks that have a value already, to which others are added."""
        exchange, writes = step.exchange, WRITES[phase]
        ranks = self.plan.ranks
        layout = exchange.layout_of(writes)
        if writes not in buffers:
            buffers[writes] = jnp.zeros(_largest(layout), buffers["source"].dtype)
        if is_alike(step):
            self._alike(step, rounds(step, phase, ranks, likeness), writes, buffers, me, written)
            return
        ordered = rounds(step, phase, ranks, elements)
        sizes = [elements(next(iter(pairs.values()))) for pairs in ordered]
        sent = {rank: [_of(pairs, rank, 0) for pairs in ordered] for rank in ranks}
        come = {rank: [_of(pairs, rank, 1) for pairs in ordered] for rank in ranks}
        packs = [functools.partial(_pack, step, sent[rank], rank, sizes) for rank in ranks]
        messages = lax.switch(me, packs, dict(buffers))
        arrived = [self._carried(message, pairs) for pairs, message in zip(ordered, messages, strict=True)]
        unpacks = []
        for rank in ranks:
            firsts = []
            for part in (part for parts in come[rank] for part in parts):
                firsts.append((writes, rank, part.piece) not in written)
                written.add((writes, rank, part.piece))
            unpacks.append(functools.partial(_unpack, layout, come[rank], rank, firsts))
        buffers[writes] = lax.switch(me, unpacks, buffers[writes], arrived)

    def _alike(
        self, step: Step, ordered: list[Pairs], writes: str, buffers: dict[str, jax.Array], me, written: set
    ) -> None:
        """A phase in which all ranks do alike: only where their pieces start differs, and is looked up."""
        layout = step.exchange.layout_of(writes)
        arrived = []
        for pairs in ordered:
            pieces = []
            for k, like in enumerate(next(iter(pairs.values()))):
                of = step.exchange.layout_of(like.origin)
                shard = buffers[like.origin].reshape(of.local_shape(self.plan.ranks[0]))
                table = self._starts(of, {sender: parts[k].piece for (sender, _), parts in pairs.items()})
                pieces.append(_read(shard, like.piece, table[me]))
            arrived.append(self._carried(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), pairs))
        shard = buffers[writes].reshape(layout.local_shape(self.plan.ranks[0]))
        for pairs, message in zip(ordered, arrived, strict=True):
            done = 0
            for k, like in enumerate(next(iter(pairs.values()))):
                parts = {receiver: parts[k] for (_, receiver), parts in pairs.items()}
                at = self._starts(layout, {rank: part.piece for rank, part in parts.items()})[me]
                values = message[done : done + like.piece.size]
                done += like.piece.size
                keys = {(writes, receiver, part.piece) for receiver, part in parts.items()}
                held = _read(shard, like.piece, at)
                values = values + held if keys & written else values
                if len(parts) < len(self.plan.ranks):
                    receives = np.isin(self.plan.ranks, list(parts))
                    values = jnp.where(jnp.asarray(receives)[me], values, held)
                written |= keys
                shard = _put(shard, like.piece, at, values)
        buffers[writes] = shard.reshape(-1)

    def _starts(self, layout: Layout, pieces: Mapping[int, Piece]) -> jax.Array:
        """int32 [ranks, dims + 1]: where a piece's box starts in the shard of each rank, and the piece in the box."""
        table = np.zeros((len(self.plan.ranks), len(layout.shape) + 1), np.int32)
        for rank, piece in pieces.items():
            starts = [one.start for one in local_slices(piece.box, layout, rank)]
            table[self.place[rank]] = [*starts, piece.start]
        return jnp.asarray(table)

    def _carried(self, message: jax.Array, pairs: Pairs) -> jax.Array:
        """What came to each rank in a round; zeros where nothing did."""
        if all(sender == receiver for sender, receiver in pairs):
            return message
        return lax.ppermute(message, self.axes, [(self.place[one], self.place[other]) for one, other in pairs])


def _read(shard: jax.Array, piece: Piece, at: jax.Array) -> jax.Array:
    """A piece [size] of a shard, from a row of `_starts`."""
    region = lax.dynamic_slice(shard, tuple(at[:-1]), piece.lengths).reshape(-1)
    return region if piece.size == region.size else lax.dynamic_slice(region, (at[-1],), (piece.size,))


def _put(shard: jax.Array, piece: Piece, at: jax.Array, values: jax.Array) -> jax.Array:
    """The shard with other values for a piece."""
    lengths, starts = piece.lengths, tuple(at[:-1])
    if piece.size == shard.size:
        return values.reshape(shard.shape)
    if piece.size < math.prod(lengths):
        region = lax.dynamic_slice(shard, starts, lengths).reshape(-1)
        values = lax.dynamic_update_slice(region, values, (at[-1],))
    return lax.dynamic_update_slice(shard, values.reshape(lengths), starts)


def _unpadded(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The shard of a rank, from its block."""
    return block if block.shape == shape else block[: math.prod(shape)].reshape(shape)


def _of(pairs: Pairs, rank: int, end: int) -> list[Transfer]:
    """What `rank` sends (end 0) or receives (end 1) in a round, where it has one partner at most."""
    return next((parts for pair, parts in pairs.items() if pair[end] == rank), [])


def _pack(step: Step, rounds: list[list[Transfer]], rank: int, sizes: list[int], buffers: dict[str, jax.Array]):
    """The message of each round; zeros where this rank sends none."""
    messages = []
    for parts, size in zip(rounds, sizes, strict=True):
        packed = []
        for part in parts:
            layout = step.exchange.layout_of(part.origin)
            packed.append(_region(buffers[part.origin], layout, rank, part))
        messages.append(jnp.concatenate(packed) if packed else jnp.zeros(size, buffers["source"].dtype))
    return messages


def _unpack(
    layout: Layout,
    rounds: list[list[Transfer]],
    rank: int,
    firsts: list[bool],
    buffer: jax.Array,
    messages: list[jax.Array],
):
    """The buffer with what came at its place: written where it is the first there, else added."""
    if not any(rounds):
        return buffer
    shape = layout.local_shape(rank)
    shard = buffer[: math.prod(shape)].reshape(shape)
    is_first = iter(firsts)
    for parts, message in zip(rounds, messages, strict=True):
        done = 0
        for part in parts:
            values = message[done : done + part.piece.size]
            done += part.piece.size
            slices = local_slices(part.piece.box, layout, rank)
            region = shard[slices]
            if part.piece.size == volume(part.piece.box):
                values = values.reshape(region.shape)
                values = values if next(is_first) else region + values
            else:
                flat = region.reshape(-1)
                before = flat[part.piece.start : part.piece.stop]
                values = values if next(is_first) else before + values
                values = lax.dynamic_update_slice(flat, values, (part.piece.start,)).reshape(region.shape)
            # not `at[...]`: that is a scatter, which XLA does element by element on CPU
            shard = lax.dynamic_update_slice(shard, values, tuple(one.start for one in slices))
    return jnp.pad(shard.reshape(-1), (0, buffer.size - shard.size))


def _region(buffer: jax.Array, layout: Layout, rank: int, part: Transfer) -> jax.Array:
    shape = layout.local_shape(rank)
    shard = buffer[: math.prod(shape)].reshape(shape)
    return shard[local_slices(part.piece.box, layout, rank)].reshape(-1)[part.piece.start : part.piece.stop]


@functools.lru_cache(maxsize=256)
def program(plan: BoxingPlan, devices: tuple) -> _Program:
    """The program of a plan on these devices; compiled when it first runs."""
    return _Program(plan, devices)


def _is_native(step: Step) -> bool:
    return step.kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute") and is_alike(step)


def _halved(values: jax.Array, dim: int, axis: str) -> jax.Array:
    """The sum over two ranks, each of which keeps its half along `dim`: only the other half is copied."""
    me = lax.axis_index(axis)
    half = values.shape[dim] // 2
    own, other = (lax.dynamic_slice_in_dim(values, k * half, half, dim) for k in (me, 1 - me))
    return own + lax.ppermute(other, axis, [(0, 1), (1, 0)])


def _parted(values: jax.Array, dims: list[int], sizes: list[int]) -> jax.Array:
    """The blocks of a shard, in front: [*sizes, *block]; `dims` says which dim each size cuts, outer first."""
    shape: list[int] = []
    at, rest = {}, []
    for dim, length in enumerate(values.shape):
        for number, size in enumerate(sizes):
            if dims[number] == dim:
                at[number] = len(shape)
                shape.append(size)
                length //= size
        rest.append(len(shape))
        shape.append(length)
    return values.reshape(shape).transpose(*(at[number] for number in range(len(sizes))), *rest)


def _joined(blocks: jax.Array, dims: list[int]) -> jax.Array:
    """The shard [*lengths] of blocks [*sizes, *block]: the inverse of `_parted`."""
    lengths = list(blocks.shape[len(dims) :])
    order = []
    for dim in range(len(lengths)):
        for number in (number for number, of in enumerate(dims) if of == dim):
            order.append(number)
            lengths[dim] *= blocks.shape[number]
        order.append(len(dims) + dim)
    return blocks.transpose(order).reshape(lengths)


def _dim(layout: Layout, axis: int) -> int:
    part = layout.nd_sbp[axis]
    assert isinstance(part, Split)
    return part.dim


def _block(plan: BoxingPlan, layout: Layout) -> tuple[int, ...]:
    """Shape of what the program takes, or gives, for each rank."""
    shapes = {layout.local_shape(rank) for rank in layout.placement.ranks}
    is_plain = len(shapes) == 1 and set(layout.placement.ranks) == set(plan.ranks) and layout.shape
    return shapes.pop() if is_plain else (_largest(layout),)


def _largest(layout: Layout) -> int:
    return max(math.prod(layout.local_shape(rank)) for rank in layout.placement.ranks)
