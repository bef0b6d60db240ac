"""An exchange between shards of one shape as one SPMD program.

All ranks run the same collectives on arrays of the same shapes. What differs between them are offsets, which come from
tables indexed by the rank (`RankGrid.lookup`), and how received messages are put together, which is a branch of a
`switch` on a *recipe* (`RankGrid.by_recipe`): ranks with equal recipes share a branch.

Sums go by reduce-scatters, copies by all-gathers, trades by all-to-alls where the schedule finds that these receive
what the phase does; everything else goes in rounds of `ppermute`.

Example: `S(0),B -> B,S(0)` on ranks [[0, 1], [2, 3]]. Ranks 0 and 1 hold the upper rows, 2 and 3 the lower; 0 and 2
want the upper, 1 and 3 the lower. Ranks 0 and 3 have what they want. Rank 1 can take the lower rows from 2 or 3, and
rank 2 the upper from 0 or 1; the schedule takes the two that have nothing else to send, so that one `ppermute` in which
ranks 1 and 2 trade is the whole program.

Limits: a target shard is assembled at the end, so a rank holds all messages of a phase at once. Pieces that are not
whole rows of their box travel flat, which takes XLA's CPU backend twice as long.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from keras_flow.backends.jax.rank_grid import RankGrid
from keras_flow.backends.jax.schedule import Sums, by_form, gathered_pieces, in_rounds, scattered_sums, shapes
from keras_flow.boxing.blocks import local_slices
from keras_flow.boxing.messages import Piece
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout

#: rank -> a piece of it; all of one shape
Pieces = Mapping[int, Piece]
#: [dims + 1]: where a piece starts, as `Buffer.start` says; plain numbers where it is the same on all ranks
Start = jax.Array | tuple[int, ...]


def run_uniform(step: Step, flat: jax.Array, grid: RankGrid) -> jax.Array:
    """Run an exchange on this rank's shard of the source, given and returned flat."""
    source = step.exchange.source
    # a phase may add to what the phase before has written
    target = Buffer(step.exchange.target, grid)
    buffers = {"source": Buffer(source, grid, flat.reshape(source.local_shape(grid.ranks[0]))), "result": target}
    for phase in step.phases:
        # XLA's own collectives where one of them is the whole phase; messages, round by round, elsewhere
        sums = scattered_sums(step) if phase == "reduce" and grid.on_axes else None
        if sums is not None:
            _reduce_scatter(step, sums, buffers["source"], target)
        elif phase == "gather" and grid.on_axes and _holds_what_it_gathers(step, target):
            _all_gather(step, target)
        else:
            _send_messages(step, phase, buffers, target)
    return target.shard().reshape(-1)


# ---- buffers


@dataclass
class Buffer:
    """The source or the result of a step: a shard that is there, or messages that it will be assembled from.

    Attributes:
        layout: the layout that it is a shard of.
        grid: the ranks.
        array: the shard where it is there, as the source's is from the beginning.
        received: else the messages so far: values [*message_shape], and which piece they are on each rank; a rank that
            is missing received none. Several messages for one piece are added.
    """

    layout: Layout
    grid: RankGrid
    array: jax.Array | None = None
    received: list[tuple[jax.Array, Pieces]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a rank's shard."""
        return self.layout.local_shape(self.grid.ranks[0])

    def start(self, rank: int, piece: Piece) -> tuple[int, ...]:
        """Return where a piece is in the shard of a rank: the start of its box, and its own start within the box.

        Of a piece of whole rows: the start of its first row, and 0.
        """
        first, *rest = [*(part.start for part in local_slices(piece.box, self.layout, rank)), piece.start]
        row = _row_size(piece)
        return (first, *rest) if row is None else (first + piece.start // row, *rest[:-1], 0)

    def receive(self, values: jax.Array, pieces: Pieces) -> None:
        """Store a message; add it to an earlier one that is for the same pieces of the same ranks."""
        for number, (earlier, of) in enumerate(self.received):
            if of == pieces:
                if len(of) < len(self.grid.ranks):
                    # only some ranks received anything: the others, whose values nobody reads, do not touch memory
                    has_message = self.grid.lookup([rank in of for rank in self.grid.ranks]) != 0
                    total = lax.cond(has_message, operator.add, lambda _, values: values, earlier, values)
                else:
                    total = earlier + values
                self.received[number] = total, of
                return
        self.received.append((values, pieces))

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces that a rank received, in the order in which they are in its shard."""
        received = {pieces[rank] for _, pieces in self.received if rank in pieces}
        return sorted(received, key=lambda piece: self.start(rank, piece))

    def messages_for(self, rank: int, piece: Piece) -> tuple[int, ...]:
        """Numbers of the received messages whose sum is a piece of a rank."""
        return tuple(number for number, (_, pieces) in enumerate(self.received) if pieces.get(rank) == piece)

    def read(self, pieces: Pieces) -> jax.Array:
        """This rank's piece [*message_shape]."""
        # pieces of a call have one shape; it stands for all
        like = next(iter(pieces.values()))
        if self.array is None:
            messages = {rank: self.messages_for(rank, piece) for rank, piece in pieces.items()}
            if all(messages.values()):  # it is as it was received: no need to assemble a shard and cut it again
                return self.grid.by_recipe(messages, self._sum, is_cheap=True)
        starts = {rank: self.start(rank, piece) for rank, piece in pieces.items()}
        # a constant start lets XLA see a static slice, which it can fuse
        at = starts[next(iter(starts))]
        if len(set(starts.values())) > 1:
            at = self.grid.lookup([starts.get(rank, at) for rank in self.grid.ranks])
        return _read_piece(self.shard(), like, at)

    def shard(self) -> jax.Array:
        """The shard; zeros where nothing was received."""
        if self.array is not None:
            return self.array
        recipes = {
            rank: tuple(
                (_region_shape(piece), self.start(rank, piece), self.messages_for(rank, piece))
                for piece in self.pieces(rank)
            )
            for rank in self.grid.ranks
        }
        # then every rank has one piece already, and nothing is to be put together
        is_whole = all(len(recipe) == 1 and recipe[0][0] == self.shape for recipe in recipes.values())
        return self.grid.by_recipe(recipes, self._assembled, is_cheap=is_whole)

    def _sum(self, messages: tuple[int, ...]) -> jax.Array:
        """The sum of received messages, given by number."""
        return functools.reduce(operator.add, [self.received[number][0] for number in messages])

    def _assembled(self, recipe: tuple) -> jax.Array:
        """A shard from the recipe of a rank: for each piece its region's shape, its start, and its messages."""
        blocks = [(start, self._sum(messages)) for _, start, messages in recipe]
        shard = _concatenated(blocks, self.shape)
        if shard is None:
            shard = jnp.zeros(self.shape, self.received[0][0].dtype)
            for (region, _, _), (start, values) in zip(recipe, blocks, strict=True):
                shard = _write_piece(shard, region, start, values)
        return shard


# ---- ways to carry a phase's messages


def _send_messages(step: Step, phase: str, buffers: Mapping[str, Buffer], target: Buffer) -> None:
    """The messages of a phase one by one: those of one form by all-to-alls or in rounds."""
    arrived = []
    for parcels in by_form(step, phase, target.grid.ranks, shapes):
        pairs, parcel_of = list(parcels), list(parcels.values())
        first = parcel_of[0]  # all parcels have its form

        def read(numbers: Mapping[int, int], parcel_of=parcel_of, first=first) -> jax.Array:
            values = [
                buffers[message.origin].read({rank: parcel_of[number][k].piece for rank, number in numbers.items()})
                for k, message in enumerate(first)
            ]
            return values[0] if len(values) == 1 else jnp.concatenate([part.reshape(-1) for part in values])

        for parcel, numbers in _transport(target.grid, pairs, read):
            done = 0
            for k, message in enumerate(first):
                values = parcel if len(first) == 1 else parcel[done : done + message.piece.size]
                done += message.piece.size
                pieces = {receiver: parcel_of[number][k].piece for receiver, number in numbers.items()}
                arrived.append((values.reshape(message_shape(message.piece)), pieces))
    for values, pieces in arrived:  # all are read before any is stored: a phase reads what the phases before it wrote
        target.receive(values, pieces)


def _transport(
    grid: RankGrid, pairs: Sequence[tuple[int, int]], read: Callable[[Mapping[int, int]], jax.Array]
) -> list[tuple[jax.Array, dict[int, int]]]:
    """Send messages of one shape.

    Args:
        grid: the ranks.
        pairs: sender and receiver of each message.
        read: takes the number of a message for each sender; returns the values to send.

    Returns:
        Received values, each with the number of its message on the ranks that receive it.
    """
    names = grid.all_to_all_axes(pairs)
    # with one message a rank the all-to-all is a single permute anyway
    if names and len(pairs) > len(grid.ranks):
        number_of = {pair: number for number, pair in enumerate(pairs)}
        members = grid.groups_along(names)
        size = len(members[grid.ranks[0]])
        blocks = [read({rank: number_of[rank, members[rank][k]] for rank in grid.ranks}) for k in range(size)]
        blocks = lax.all_to_all(jnp.stack(blocks), names, 0, 0)
        return [(blocks[k], {rank: number_of[members[rank][k], rank] for rank in grid.ranks}) for k in range(size)]
    received = []
    for numbers in in_rounds(pairs, grid.ranks):
        values = read({pairs[number][0]: number for number in numbers})
        values = grid.permute(values, [pairs[number] for number in numbers])
        received.append((values, {pairs[number][1]: number for number in numbers}))
    return received


def _reduce_scatter(step: Step, sums: Sequence[Sums], source: Buffer, target: Buffer) -> None:
    """The sums of `scattered_sums` by one reduce-scatter; those that other ranks want are sent on."""
    exchange, grid = step.exchange, source.grid
    names = tuple(grid.axes[axis] for axis in exchange.source_blocks.partial_axes if axis not in exchange.apart)
    members = grid.groups_along(names)
    blocks = [
        source.read({rank: adding[members[rank][k]][1] for rank in members})
        for k in range(exchange.summand_count)
        for adding in sums
    ]
    summed = lax.psum_scatter(jnp.concatenate(blocks), names, tiled=True)
    summed = summed.reshape(len(sums), *blocks[0].shape)
    pairs = [(adder, receiver) for adding in sums for adder, (receiver, _) in adding.items()]
    pieces = [piece for adding in sums for _, piece in adding.values()]
    slots = [slot for slot, adding in enumerate(sums) for _ in adding]

    def read(numbers: Mapping[int, int]) -> jax.Array:
        # ranks that send nothing read slot 0: their values go nowhere
        slot_of = [slots[numbers[rank]] if rank in numbers else 0 for rank in grid.ranks]
        if len({slots[number] for number in numbers.values()}) == 1:
            return summed[slots[next(iter(numbers.values()))]]
        return lax.dynamic_index_in_dim(summed, grid.lookup(slot_of), keepdims=False)

    for values, numbers in _transport(grid, pairs, read):
        target.receive(values, {receiver: pieces[number] for receiver, number in numbers.items()})


def _holds_what_it_gathers(step: Step, target: Buffer) -> bool:
    """Whether every rank received exactly the pieces that an all-gather would give the others."""
    gives = gathered_pieces(step)
    return gives is not None and all(frozenset(target.pieces(rank)) == gives[rank] for rank in gives)


def _all_gather(step: Step, target: Buffer) -> None:
    """All that the destinations of a target block have of it to all of them, by one all-gather."""
    grid = target.grid
    pieces = {rank: target.pieces(rank) for rank in grid.ranks}
    names = tuple(grid.axes[axis] for axis in step.exchange.target_blocks.copy_axes)
    numbers = range(len(pieces[grid.ranks[0]]))
    # all pieces of a rank in one collective: each call costs a meeting of all ranks
    blocks = jnp.stack([target.read({rank: pieces[rank][number] for rank in pieces}) for number in numbers])
    blocks = lax.all_gather(blocks, names)
    members = grid.groups_along(names)
    target.received = [
        (blocks[k, number], {rank: pieces[members[rank][k]][number] for rank in grid.ranks})
        for k in range(len(blocks))
        for number in numbers
    ]


# ---- pieces in a shard


def _row_size(piece: Piece) -> int | None:
    """Elements of a row of its box, where a piece is whole rows of it."""
    row = math.prod(piece.box_shape[1:])
    return row if piece.box_shape and row and not (piece.start % row or piece.size % row) else None


def _region_shape(piece: Piece) -> tuple[int, ...]:
    """Shape of the region of a shard that a piece is in: its rows, else its box."""
    row = _row_size(piece)
    return piece.box_shape if row is None else (piece.size // row, *piece.box_shape[1:])


def message_shape(piece: Piece) -> tuple[int, ...]:
    """The shape in which a piece travels: that of its rows, else flat.

    Flattening is a copy that takes XLA's CPU backend twice as long as one that keeps rows.
    """
    return (piece.size,) if _row_size(piece) is None else _region_shape(piece)


def _read_piece(shard: jax.Array, piece: Piece, at: Start) -> jax.Array:
    """A piece of a shard [*message_shape], from where it starts."""
    region = lax.dynamic_slice(shard, tuple(at[:-1]), _region_shape(piece))
    if _row_size(piece) is not None:
        return region
    return lax.dynamic_slice(region.reshape(-1), (at[-1],), (piece.size,))


def _write_piece(shard: jax.Array, region: tuple[int, ...], at: tuple[int, ...], values: jax.Array) -> jax.Array:
    """The shard with other values for a piece."""
    *starts, first = at
    if values.shape != region:
        flat = lax.dynamic_slice(shard, starts, region).reshape(-1)
        values = lax.dynamic_update_slice(flat, values, (first,)).reshape(region)
    return lax.dynamic_update_slice(shard, values, starts)


def _concatenated(blocks: Sequence[tuple[tuple[int, ...], jax.Array]], shape: tuple[int, ...]) -> jax.Array | None:
    """Blocks, given with their starts, joined along one dim; None where that does not make the whole shape.

    Not along two dims: XLA writes what it joins first twice, so that it is no quicker than to write into zeros.
    """
    values = [values for _, values in blocks]
    if len(values) == 1:
        return values[0] if values[0].shape == shape else None
    dims = {dim for start, _ in blocks for dim in range(len(shape)) if start[dim]}
    if len(dims) != 1 or any(block.ndim != len(shape) for block in values):
        return None
    # one block may be longer than another, but across the other dims all must be alike
    (dim,) = dims
    others = {block.shape[:dim] + block.shape[dim + 1 :] for block in values}
    fills = sum(block.shape[dim] for block in values) == shape[dim] and others == {shape[:dim] + shape[dim + 1 :]}
    return jnp.concatenate(values, dim) if fills else None
