"""Boxing on JAX: one compiled `shard_map` program for each plan.

The named collectives on shards of one shape are XLA's own, over the axes of the placement. Everything else goes in
rounds of `ppermute`: in one round ranks send messages of one size to the rank so many places on, so that nothing is
padded on its way; what differs between ranks (which elements) is a branch of a `switch` on the rank's place. Shards of
different shapes are held in flat buffers, padded to the largest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_flow.backends.jax.devices import rank_devices
from keras_flow.boxing.cells import volume
from keras_flow.boxing.pieces import WRITES, Piece, Transfer
from keras_flow.boxing.simulate import local_slices
from keras_flow.boxing.spec import BoxingPlan, Step
from keras_flow.layout import Layout
from keras_flow.sbp import Split

#: the messages of a round: (sender, receiver) -> what is in its message
Pairs = dict[tuple[int, int], list[Transfer]]


def redistribute(plan: BoxingPlan, shards: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """Run a plan; shards by rank, all ranks of this host."""
    if not plan.steps:
        return dict(shards)
    made = program(plan, rank_devices())
    like = next(iter(shards.values()))
    pieces = [made.enter(rank, shards.get(rank), like) for rank in plan.ranks]
    given = jax.make_array_from_single_device_arrays(made.shape_of_all, made.sharding, pieces)
    out = made.compiled(like.dtype)(given)
    of_device = {shard.device: shard.data for shard in out.addressable_shards}
    return {rank: made.leave(rank, of_device[made.devices[rank]]) for rank in plan.target.placement.ranks}


class _Program:
    """The compiled program of a plan. It takes and gives one array whose dim 0 is cut over all ranks.

    Where all ranks hold shards of one shape these are the blocks of that array as they are; else a block is a shard
    laid flat and padded to the largest.
    """

    def __init__(self, plan: BoxingPlan, devices: tuple):
        self.plan, self.devices = plan, devices
        self.place = {rank: place for place, rank in enumerate(plan.ranks)}
        self.source_block = _block(plan, plan.source)
        self.target_block = _block(plan, plan.target)
        placement = plan.source.placement
        on_axes = plan.ranks == placement.ranks and all(step.exchange.same_placement for step in plan.steps)
        hierarchy = placement.hierarchy if on_axes else (len(plan.ranks),)
        self.axes = tuple(f"axis{axis}" for axis in range(len(hierarchy)))
        mesh = Mesh(np.array([devices[rank] for rank in plan.ranks]).reshape(hierarchy), self.axes)
        spec = PartitionSpec(self.axes)
        self.sharding = NamedSharding(mesh, spec)
        self.run = jax.jit(jax.shard_map(self._body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        self._compiled: dict = {}

    @property
    def shape_of_all(self) -> tuple[int, ...]:
        """Shape of the array that it takes."""
        return (len(self.plan.ranks) * self.source_block[0], *self.source_block[1:])

    def enter(self, rank: int, shard: jax.Array | None, like: jax.Array) -> jax.Array:
        """The block of a rank."""
        if shard is not None and shard.shape == self.source_block:
            here = self.devices[rank]
            return shard if shard.devices() == {here} else jax.device_put(shard, here)
        (size,) = self.source_block
        values = np.zeros(0, like.dtype) if shard is None else shard.reshape(-1)
        return jax.device_put(jnp.pad(values, (0, size - values.size)), self.devices[rank])

    def leave(self, rank: int, block: jax.Array) -> jax.Array:
        """The shard of a rank, from its block."""
        shape = self.plan.target.local_shape(rank)
        return block if block.shape == shape else block[: math.prod(shape)].reshape(shape)

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
        for step in self.plan.steps:
            held = self._native(step, held) if _is_native(step) else self._exchange(step, held)
        return held.reshape(self.target_block).astype(block.dtype)

    def _native(self, step: Step, held: jax.Array) -> jax.Array:
        """One of XLA's own collectives; all shards have one shape."""
        source, target = step.exchange.source, step.exchange.target
        values = held.reshape(source.local_shape(source.placement.ranks[0]))
        changed = [axis for axis in range(source.placement.ndim) if axis not in step.exchange.apart]
        if step.kind == "all_reduce":
            return lax.psum(values, tuple(self.axes[axis] for axis in changed)).reshape(-1)
        if step.kind == "all_gather":
            for axis in reversed(changed):  # the inner block first
                dim = _dim(source, axis)  # in front: XLA's CPU collectives are slow along another dim
                values = lax.all_gather(jnp.moveaxis(values, dim, 0), self.axes[axis], axis=0, tiled=True)
                values = jnp.moveaxis(values, 0, dim)
        if step.kind == "reduce_scatter":
            for axis in changed:  # the outer block first
                dim = _dim(target, axis)
                values = lax.psum_scatter(
                    jnp.moveaxis(values, dim, 0), self.axes[axis], scatter_dimension=0, tiled=True
                )
                values = jnp.moveaxis(values, 0, dim)
        if step.kind == "all_to_all":
            (axis,) = changed
            split, joined = _dim(target, axis), _dim(source, axis)
            values = lax.all_to_all(values, self.axes[axis], split, joined, tiled=True)
        if step.kind == "permute":
            values = self._permute(step, values)
        return values.reshape(-1)

    def _permute(self, step: Step, values: jax.Array) -> jax.Array:
        """Whole shards change hands; some ranks may keep theirs."""
        senders = [next(iter(step.exchange.receives(rank, "move"))).sender for rank in self.plan.ranks]
        pairs = [(self.place[sender], place) for place, sender in enumerate(senders) if self.place[sender] != place]
        keeps = np.array([self.place[sender] == place for place, sender in enumerate(senders)])
        moved = lax.ppermute(values, self.axes, pairs)
        return jnp.where(jnp.asarray(keeps)[lax.axis_index(self.axes)], values, moved) if keeps.any() else moved

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
        layout = exchange.source if writes == "combined" else exchange.target
        if writes not in buffers:
            buffers[writes] = jnp.zeros(_largest(layout), buffers["source"].dtype)
        ordered = self._rounds(step, phase)
        sizes = [size for _, size, _ in ordered]
        sent = {rank: [_of(pairs, rank, 0) for *_, pairs in ordered] for rank in ranks}
        come = {rank: [_of(pairs, rank, 1) for *_, pairs in ordered] for rank in ranks}
        packs = [functools.partial(_pack, step, sent[rank], rank, sizes) for rank in ranks]
        messages = lax.switch(me, packs, dict(buffers))
        arrived = []
        for (shift, _, pairs), message in zip(ordered, messages, strict=True):
            places = [(self.place[sender], self.place[receiver]) for sender, receiver in pairs]
            arrived.append(lax.ppermute(message, self.axes, places) if shift else message)
        unpacks = []
        for rank in ranks:
            firsts = []
            for part in (part for parts in come[rank] for part in parts):
                firsts.append((writes, rank, part.piece) not in written)
                written.add((writes, rank, part.piece))
            unpacks.append(functools.partial(_unpack, layout, come[rank], rank, firsts))
        buffers[writes] = lax.switch(me, unpacks, buffers[writes], arrived)

    def _rounds(self, step: Step, phase: str) -> list[tuple[int, int, Pairs]]:
        """The messages of a phase by how many places they travel and their size; 0 places: what a rank has itself."""
        messages: Pairs = {}
        for rank in self.plan.ranks:
            for part in step.exchange.receives(rank, phase):
                messages.setdefault((part.sender, rank), []).append(part)
        rounds: dict[tuple[int, int], Pairs] = {}
        for (sender, receiver), parts in messages.items():
            shift = (self.place[receiver] - self.place[sender]) % len(self.plan.ranks)
            size = sum(part.piece.size for part in parts)
            rounds.setdefault((shift, size), {})[sender, receiver] = parts
        return [(*key, pairs) for key, pairs in sorted(rounds.items())]


def _of(pairs: Pairs, rank: int, end: int) -> list[Transfer]:
    """What `rank` sends (end 0) or receives (end 1) in a round, where it has one partner at most."""
    return next((parts for pair, parts in pairs.items() if pair[end] == rank), [])


def _pack(step: Step, rounds: list[list[Transfer]], rank: int, sizes: list[int], buffers: dict[str, jax.Array]):
    """The message of each round; zeros where this rank sends none."""
    messages = []
    for parts, size in zip(rounds, sizes, strict=True):
        packed = []
        for part in parts:
            layout = step.exchange.target if part.origin == "result" else step.exchange.source
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
    source, target = step.exchange.source, step.exchange.target
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
    if not step.exchange.same_placement or step.kind not in kinds:
        return False
    return source.divides and target.divides and 0 not in source.shape


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
