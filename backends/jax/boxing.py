"""Boxing on JAX: one compiled `shard_map` program for each plan.

Steps run in one of three ways, from the quickest:

1. a named collective between shards of one shape is XLA's own, over the axes of the placement (`_native`);
2. an exchange between shards of one shape is one SPMD program (`uniform_exchange.py`);
3. shards of different shapes (`_padded`) are held in flat buffers as long as the largest. Every rank packs and unpacks
   in a branch of a `switch` of its own. Only buffers are padded: messages go in rounds of one size each.

The two exchanges share the schedule of their rounds (`schedule.py`). They do not share the rest: one indexes tables in
a program that all ranks have in common, the other has one branch for each rank.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_flow.backends.jax.devices import rank_devices, world
from keras_flow.backends.jax.rank_grid import RankGrid
from keras_flow.backends.jax.schedule import Parcels, element_count, is_uniform, rounds
from keras_flow.backends.jax.uniform_exchange import run_uniform
from keras_flow.boxing.blocks import local_slices, volume
from keras_flow.boxing.lowering import lower, refined
from keras_flow.boxing.messages import Message, Piece
from keras_flow.boxing.phases import receives
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout
from keras_flow.sbp import Split


def redistribute(plan: BoxingPlan, shards: Mapping[int, jax.Array]) -> Mapping[int, jax.Array]:
    """Run a plan; shards by rank, all ranks of this process. Each process that has ranks of the plan calls it."""
    if not plan.steps or not set(plan.ranks) & set(world().local_ranks):
        return shards
    compiled = program(plan, rank_devices())
    return Shards(plan.target, compiled.run(compiled.given(shards)))


class Shards(Mapping[int, jax.Array]):
    """The shards that a program left in one array.

    They are split off when one is asked for, not for the next plan, which takes the array as it is.

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
        mine = world().local_ranks
        return (rank for rank in self.layout.placement.ranks if rank in mine)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def block_until_ready(self) -> Shards:
        """Wait until all shards are there, as `jax.Array.block_until_ready` does."""
        self.array.block_until_ready()
        return self


class _Program:
    """The compiled program of a plan. It takes and gives one array whose dim 0 is divided over all ranks.

    A rank's part of this array, its *block*, is its shard where all ranks hold shards of one shape; else the flat shard
    padded to the largest.

    Attributes:
        steps: the plan's, lowered to collectives where that is possible.
        shape_of_all: shape of the array that it takes.
    """

    def __init__(self, plan: BoxingPlan, devices: tuple):
        self.plan, self.devices = plan, devices
        self.steps = lower(plan).steps
        self.source_block = _block(plan, plan.source)
        self.shape_of_all = (len(plan.ranks) * self.source_block[0], *self.source_block[1:])
        self.target_block = _block(plan, plan.target)
        placement = plan.source.placement
        # lowering refined the axes: then the mesh has the refined ones too, and coarse steps go over several of them
        if any(step.exchange.source.placement.ndim > placement.ndim for step in self.steps):
            placement = refined(placement)
        # whether collectives can go over the axes of the placement; else the mesh has one axis with all ranks
        on_axes = plan.ranks == placement.ranks and all(
            step.exchange.same_placement or is_uniform(step) for step in self.steps
        )
        sizes = placement.hierarchy if on_axes else (len(plan.ranks),)
        self.grid = RankGrid(plan.ranks, placement.axis_names if on_axes else ("ranks",), sizes, on_axes)
        mesh = Mesh(np.array([devices[rank] for rank in plan.ranks]).reshape(sizes), self.grid.axes)
        spec = PartitionSpec(self.grid.axes)
        self.sharding = NamedSharding(mesh, spec)
        self.body = jax.shard_map(self._body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        self.run = jax.jit(self.body, compiler_options=_compiler_options(mesh))
        self._compiled: dict = {}

    def given(self, shards: Mapping[int, jax.Array]) -> jax.Array:
        """The array that it takes, of the shards of all ranks."""
        # the array of the plan before, as it is: a chain of plans needs no copies between them
        if isinstance(shards, Shards):
            array = shards.array
            if array.shape == self.shape_of_all and array.sharding == self.sharding:
                return array
        dtype = next(iter(shards.values())).dtype if shards else np.dtype(self.plan.dtype)
        mine = world().local_ranks
        blocks = [self._block_of(rank, shards.get(rank), dtype) for rank in self.plan.ranks if rank in mine]
        return jax.make_array_from_single_device_arrays(self.shape_of_all, self.sharding, blocks)

    def _block_of(self, rank: int, shard: jax.Array | None, dtype: np.dtype) -> jax.Array:
        """The block of a rank."""
        if shard is not None and shard.shape == self.source_block:
            # `device_put` would make a copy even where the shard is on the device already
            here = self.devices[rank]
            return shard if shard.devices() == {here} else jax.device_put(shard, here)
        (size,) = self.source_block
        values = np.zeros(0, dtype) if shard is None else shard.reshape(-1)
        return jax.device_put(jnp.pad(values, (0, size - values.size)), self.devices[rank])

    def compiled(self, dtype):
        """The executable for one dtype; its `as_text()` shows the collectives."""
        dtype = np.dtype(dtype)
        if dtype not in self._compiled:
            like = jax.ShapeDtypeStruct(self.shape_of_all, dtype, sharding=self.sharding)
            self._compiled[dtype] = self.run.lower(like).compile()
        return self._compiled[dtype]

    def _body(self, block: jax.Array) -> jax.Array:
        flat = block.reshape(-1)
        if block.dtype == bool:
            # pieces are added: a sum of truths of 256 ranks would be 0 in a byte
            flat = flat.astype(jnp.uint8 if len(self.plan.ranks) < 256 else jnp.int32)
        for step in self.steps:
            if self.grid.on_axes and _is_native(step):
                flat = self._native(step, flat)
            elif is_uniform(step):
                flat = run_uniform(step, flat, self.grid)
            else:
                flat = self._padded(step, flat)
        return flat.reshape(self.target_block).astype(block.dtype)

    def _native(self, step: Step, flat: jax.Array) -> jax.Array:
        """One of XLA's own collectives; all shards have one shape.

        Blocks are brought along dim 0 before and back after: along another dim XLA's CPU collectives are slow.
        """
        source, target = step.exchange.source, step.exchange.target
        values = flat.reshape(source.local_shape(source.placement.ranks[0]))
        changed = [axis for axis in range(source.placement.ndim) if axis not in step.exchange.apart]
        # the mesh has the source's names; the target's axes are the same ones, and may be called otherwise
        names = tuple(source.placement.axis_names[axis] for axis in changed)
        if step.kind == "all_reduce":
            values = lax.psum(values, names)
        if step.kind == "all_gather":
            # dim 0 last: joining blocks along it moves nothing, and what is joined along other dims first is smaller
            for dim, names_of_dim in reversed(_by_dim(source, changed, names)):
                values = _join_blocks(lax.all_gather(values, names_of_dim), dim)
        if step.kind == "reduce_scatter":
            for dim, names_of_dim in _by_dim(target, changed, names):
                if lax.axis_size(names_of_dim) == 2 and len(names_of_dim) == 1 and dim:
                    values = _scatter_in_two(values, dim, *names_of_dim)
                else:
                    values = lax.psum_scatter(
                        _as_blocks(values, dim, lax.axis_size(names_of_dim)), names_of_dim, tiled=True
                    )
        if step.kind == "all_to_all":
            (axis,) = changed
            parts = _as_blocks(values, _split_dim(target, axis), lax.axis_size(names))
            blocks = lax.all_to_all(parts, names, 0, 0, tiled=True)
            values = _join_blocks(blocks.reshape(lax.axis_size(names), -1, *blocks.shape[1:]), _split_dim(source, axis))
        if step.kind == "permute":  # some ranks may keep their shard
            # a permute moves whole shards: each rank has one message, perhaps from itself
            senders = [next(iter(receives(step.exchange, rank, "move"))).sender for rank in self.plan.ranks]
            values = self.grid.permute(values, list(zip(senders, self.plan.ranks, strict=True)))
        return values.reshape(-1)

    def _padded(self, step: Step, flat: jax.Array) -> jax.Array:
        """An exchange between shards of different shapes, in flat buffers as long as the largest of them."""
        buffers = {"source": flat}
        position = self.grid.position()
        written: set[tuple[int, Piece]] = set()
        for phase in step.phases:
            self._padded_phase(step, phase, buffers, position, written)
        return buffers["result"]

    def _padded_phase(
        self,
        step: Step,
        phase: str,
        buffers: dict[str, jax.Array],
        position: jax.Array,
        written: set[tuple[int, Piece]],
    ) -> None:
        """Pack, send in rounds, unpack.

        Args:
            written: (rank, piece) of the result that have a value already, to which later messages are added.
        """
        ranks, layout = self.plan.ranks, step.exchange.target
        if "result" not in buffers:
            buffers["result"] = jnp.zeros(_largest(layout), buffers["source"].dtype)
        ordered = rounds(step, phase, ranks, element_count)
        sizes = [element_count(next(iter(parcels.values()))) for parcels in ordered]
        sent = {rank: [_parcel_of(parcels, rank, 0) for parcels in ordered] for rank in ranks}
        received = {rank: [_parcel_of(parcels, rank, 1) for parcels in ordered] for rank in ranks}
        packs = [functools.partial(_pack, step, sent[rank], rank, sizes) for rank in ranks]
        packed = lax.switch(position, packs, dict(buffers))
        # every rank takes part in every round, with zeros where it sends nothing: SPMD
        arrived = [self.grid.permute(values, list(parcels)) for parcels, values in zip(ordered, packed, strict=True)]
        unpacks = []
        for rank in ranks:
            is_first = []
            for message in (message for parcel in received[rank] for message in parcel):
                is_first.append((rank, message.piece) not in written)
                written.add((rank, message.piece))
            unpacks.append(functools.partial(_unpack, layout, received[rank], rank, is_first))
        buffers["result"] = lax.switch(position, unpacks, buffers["result"], arrived)


def _compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options for XLA.

    Where virtual devices keep all cores of a CPU busy, loops are not cut into parallel tasks: tasks of several devices
    wait for one another's threads (ADR 009).
    """
    # with idle cores parallel tasks are quicker
    is_busy = len(mesh.local_devices) >= (os.cpu_count() or 1)
    is_cpu = mesh.local_devices[0].platform == "cpu"
    return {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"} if is_cpu and is_busy else {}


def _unpadded(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The shard of a rank, from its block."""
    return block if block.shape == shape else block[: math.prod(shape)].reshape(shape)


def _parcel_of(parcels: Parcels, rank: int, end: int) -> list[Message]:
    """The messages that `rank` sends (end 0) or receives (end 1) in a round, in which it has one partner at most."""
    return next((parcel for pair, parcel in parcels.items() if pair[end] == rank), [])


def _pack(step: Step, parcels: list[list[Message]], rank: int, sizes: list[int], buffers: dict[str, jax.Array]):
    """Pack what a rank sends into one flat array for each round; zeros where it sends nothing."""
    packed = []
    for parcel, size in zip(parcels, sizes, strict=True):
        values = []
        for message in parcel:
            layout = step.exchange.layout_of(message.origin)
            values.append(_read(buffers[message.origin], layout, rank, message.piece))
        packed.append(jnp.concatenate(values) if values else jnp.zeros(size, buffers["source"].dtype))
    return packed


def _read(buffer: jax.Array, layout: Layout, rank: int, piece: Piece) -> jax.Array:
    """A piece [piece.size] of a padded buffer."""
    shape = layout.local_shape(rank)
    shard = buffer[: math.prod(shape)].reshape(shape)
    return shard[local_slices(piece.box, layout, rank)].reshape(-1)[piece.start : piece.stop]


def _unpack(
    layout: Layout,
    parcels: list[list[Message]],
    rank: int,
    is_first: list[bool],
    buffer: jax.Array,
    arrived: list[jax.Array],
):
    """The buffer with what a rank received: written where it is the first message for a piece, else added."""
    if not any(parcels):
        return buffer
    shape = layout.local_shape(rank)
    shard = buffer[: math.prod(shape)].reshape(shape)
    # in the order in which messages are unpacked, as the list was made
    firsts = iter(is_first)
    for parcel, flat in zip(parcels, arrived, strict=True):
        done = 0
        for message in parcel:
            piece = message.piece
            values = flat[done : done + piece.size]
            done += piece.size
            slices = local_slices(piece.box, layout, rank)
            region = shard[slices]
            if piece.size == volume(piece.box):
                values = values.reshape(region.shape)
                values = values if next(firsts) else region + values
            else:
                flat_region = region.reshape(-1)
                values = values if next(firsts) else flat_region[piece.start : piece.stop] + values
                values = lax.dynamic_update_slice(flat_region, values, (piece.start,)).reshape(region.shape)
            # not `at[...]`: that is a scatter, which XLA does element by element on CPU
            shard = lax.dynamic_update_slice(shard, values, tuple(part.start for part in slices))
    return jnp.pad(shard.reshape(-1), (0, buffer.size - shard.size))


@functools.lru_cache(maxsize=256)
def program(plan: BoxingPlan, devices: tuple) -> _Program:
    """The program of a plan on these devices; compiled when it first runs."""
    return _Program(plan, devices)


def _is_native(step: Step) -> bool:
    return step.kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute") and is_uniform(step)


def _by_dim(layout: Layout, axes: Sequence[int], names: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """The dims that these axes split, each with the names of its axes."""
    named: dict[int, list[str]] = {}
    for axis, name in zip(axes, names, strict=True):
        named.setdefault(_split_dim(layout, axis), []).append(name)
    return [(dim, tuple(named[dim])) for dim in sorted(named)]


def _scatter_in_two(values: jax.Array, dim: int, axis: str) -> jax.Array:
    """A reduce-scatter over two ranks, each of which keeps its half along `dim`.

    Only the half that is sent is copied; `psum_scatter` needs both halves along dim 0 first.
    """
    me = lax.axis_index(axis)
    half = values.shape[dim] // 2
    kept, sent = (lax.dynamic_slice_in_dim(values, k * half, half, dim) for k in (me, 1 - me))
    return kept + lax.ppermute(sent, axis, [(0, 1), (1, 0)])


def _as_blocks(values: jax.Array, dim: int, count: int) -> jax.Array:
    """A shard with its blocks along `dim` one after the other along dim 0."""
    length = values.shape[dim] // count
    blocks = jnp.moveaxis(values.reshape(*values.shape[:dim], count, length, *values.shape[dim + 1 :]), dim, 0)
    return blocks.reshape(-1, *blocks.shape[2:])


def _join_blocks(blocks: jax.Array, dim: int) -> jax.Array:
    """The shard whose blocks along `dim` are [count, *block]."""
    lengths = list(blocks.shape[1:])
    lengths[dim] *= len(blocks)
    return jnp.moveaxis(blocks, 0, dim).reshape(lengths)


def _split_dim(layout: Layout, axis: int) -> int:
    part = layout.nd_sbp[axis]
    assert isinstance(part, Split)
    return part.dim


def _block(plan: BoxingPlan, layout: Layout) -> tuple[int, ...]:
    """Shape of what the program takes, or gives, for each rank."""
    shapes = {layout.local_shape(rank) for rank in layout.placement.ranks}
    # a rank outside the layout would need an empty shard beside the others' shape
    is_plain = len(shapes) == 1 and set(layout.placement.ranks) == set(plan.ranks) and layout.shape
    return shapes.pop() if is_plain else (_largest(layout),)


def _largest(layout: Layout) -> int:
    return max(math.prod(layout.local_shape(rank)) for rank in layout.placement.ranks)
