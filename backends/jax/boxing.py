"""Boxing on JAX: one compiled `shard_map` program for each plan.

The named collectives on shards of one shape are XLA's own, over the axes of the placement; an exchange between shards
of one shape is in `alike.py`. What is left, shards of different shapes, goes in rounds of `ppermute`: in one round each
rank sends and receives one message at most, all of one size, so that nothing is padded on its way. Such shards are held
in flat buffers, padded to the largest; what differs between ranks is a branch of a `switch` on the rank's place.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_flow.backends.jax.devices import rank_devices
from keras_flow.backends.jax.lowering import lower, refined
from keras_flow.backends.jax.schedule import Pairs, elements, is_alike, rounds
from keras_flow.backends.jax.uniform_exchange import World, alike
from keras_flow.boxing.blocks import local_slices, volume
from keras_flow.boxing.messages import WRITES, Message, Piece
from keras_flow.boxing.phases import receives
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
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
        self.steps = lower(plan).steps
        self.source_block = _block(plan, plan.source)
        #: shape of the array that it takes
        self.shape_of_all = (len(plan.ranks) * self.source_block[0], *self.source_block[1:])
        self.target_block = _block(plan, plan.target)
        placement = plan.source.placement
        if any(step.exchange.source.placement.ndim > placement.ndim for step in self.steps):
            placement = refined(placement)
        # whether named collectives can go over the axes of the placement; else all ranks lie on one
        on_axes = plan.ranks == placement.ranks and all(
            step.exchange.same_placement or is_alike(step) for step in self.steps
        )
        sizes = placement.hierarchy if on_axes else (len(plan.ranks),)
        self.world = World(plan.ranks, placement.axis_names if on_axes else ("ranks",), sizes, on_axes)
        mesh = Mesh(np.array([devices[rank] for rank in plan.ranks]).reshape(sizes), self.world.axes)
        spec = PartitionSpec(self.world.axes)
        self.sharding = NamedSharding(mesh, spec)
        self.body = jax.shard_map(self._body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        self.run = jax.jit(self.body, compiler_options=_compiler_options(mesh))
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
            if self.world.on_axes and _is_native(step):
                held = self._native(step, held)
            elif is_alike(step):
                held = alike(step, held, self.world)
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
        names = _names(source, changed)
        if step.kind == "all_reduce":
            values = lax.psum(values, names)
        if step.kind == "all_gather":
            # dim 0 last: its blocks come one after the other, and what is brought into another order is small
            for dim, on in reversed(_by_dim(source, changed)):
                values = _joined(lax.all_gather(values, on), dim)
        if step.kind == "reduce_scatter":
            for dim, on in _by_dim(target, changed):
                if lax.axis_size(on) == 2 and dim:
                    values = _halved(values, dim, *on)
                else:
                    values = lax.psum_scatter(_parted(values, dim, lax.axis_size(on)), on, tiled=True)
        if step.kind == "all_to_all":
            (axis,) = changed
            parts = _parted(values, _dim(target, axis), lax.axis_size(names))
            blocks = lax.all_to_all(parts, names, 0, 0, tiled=True)
            values = _joined(blocks.reshape(lax.axis_size(names), -1, *blocks.shape[1:]), _dim(source, axis))
        if step.kind == "permute":  # some ranks may keep their shard
            senders = [next(iter(receives(step.exchange, rank, "move"))).sender for rank in self.plan.ranks]
            values = self.world.carried(values, list(zip(senders, self.plan.ranks, strict=True)))
        return values.reshape(-1)

    def _exchange(self, step: Step, held: jax.Array) -> jax.Array:
        buffers = {"source": held}
        me = self.world.me()
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
        ordered = rounds(step, phase, ranks, elements)
        sizes = [elements(next(iter(pairs.values()))) for pairs in ordered]
        sent = {rank: [_of(pairs, rank, 0) for pairs in ordered] for rank in ranks}
        come = {rank: [_of(pairs, rank, 1) for pairs in ordered] for rank in ranks}
        packs = [functools.partial(_pack, step, sent[rank], rank, sizes) for rank in ranks]
        messages = lax.switch(me, packs, dict(buffers))
        arrived = [self.world.carried(message, list(pairs)) for pairs, message in zip(ordered, messages, strict=True)]
        unpacks = []
        for rank in ranks:
            firsts = []
            for part in (part for parts in come[rank] for part in parts):
                firsts.append((writes, rank, part.piece) not in written)
                written.add((writes, rank, part.piece))
            unpacks.append(functools.partial(_unpack, layout, come[rank], rank, firsts))
        buffers[writes] = lax.switch(me, unpacks, buffers[writes], arrived)


def _compiler_options(mesh: Mesh) -> dict[str, str]:
    """What XLA is told. Where virtual devices keep all cores of a CPU busy, it need not cut their loops into parallel
    tasks, which have to wait for one another (ADR 009).
    """
    busy = len(mesh.local_devices) >= (os.cpu_count() or 1)
    is_cpu = mesh.local_devices[0].platform == "cpu"
    return {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"} if is_cpu and busy else {}


def _unpadded(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The shard of a rank, from its block."""
    return block if block.shape == shape else block[: math.prod(shape)].reshape(shape)


def _of(pairs: Pairs, rank: int, end: int) -> list[Message]:
    """What `rank` sends (end 0) or receives (end 1) in a round, where it has one partner at most."""
    return next((parts for pair, parts in pairs.items() if pair[end] == rank), [])


def _pack(step: Step, rounds: list[list[Message]], rank: int, sizes: list[int], buffers: dict[str, jax.Array]):
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
    rounds: list[list[Message]],
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


def _region(buffer: jax.Array, layout: Layout, rank: int, part: Message) -> jax.Array:
    shape = layout.local_shape(rank)
    shard = buffer[: math.prod(shape)].reshape(shape)
    return shard[local_slices(part.piece.box, layout, rank)].reshape(-1)[part.piece.start : part.piece.stop]


@functools.lru_cache(maxsize=256)
def program(plan: BoxingPlan, devices: tuple) -> _Program:
    """The program of a plan on these devices; compiled when it first runs."""
    return _Program(plan, devices)


def _is_native(step: Step) -> bool:
    return step.kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute") and is_alike(step)


def _names(layout: Layout, axes: Iterable[int]) -> tuple[str, ...]:
    return tuple(layout.placement.axis_names[axis] for axis in axes)


def _by_dim(layout: Layout, axes: Sequence[int]) -> list[tuple[int, tuple[str, ...]]]:
    """The dims that some axes split, each with the names of its axes."""
    dims = sorted({_dim(layout, axis) for axis in axes})
    return [(dim, _names(layout, [axis for axis in axes if _dim(layout, axis) == dim])) for dim in dims]


def _halved(values: jax.Array, dim: int, axis: str) -> jax.Array:
    """The sum over two ranks, each of which keeps its half along `dim`: only the other half is copied."""
    me = lax.axis_index(axis)
    half = values.shape[dim] // 2
    own, other = (lax.dynamic_slice_in_dim(values, k * half, half, dim) for k in (me, 1 - me))
    return own + lax.ppermute(other, axis, [(0, 1), (1, 0)])


def _parted(values: jax.Array, dim: int, count: int) -> jax.Array:
    """A shard as its blocks along `dim`, one after the other along dim 0."""
    length = values.shape[dim] // count
    blocks = jnp.moveaxis(values.reshape(*values.shape[:dim], count, length, *values.shape[dim + 1 :]), dim, 0)
    return blocks.reshape(-1, *blocks.shape[2:])


def _joined(blocks: jax.Array, dim: int) -> jax.Array:
    """The shard whose blocks along `dim` are [count, *block]."""
    lengths = list(blocks.shape[1:])
    lengths[dim] *= len(blocks)
    return jnp.moveaxis(blocks, 0, dim).reshape(lengths)


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
