"""An exchange on JAX in which all ranks do alike: shards are of one shape on each side, and so are pieces of a round.

Ranks differ only in where their pieces start, which they look up by their place, and in which of what came they take
for a piece (`World.chosen`). Sums go by reduce-scatters, copies by all-gathers and trades by all-to-alls where they lie
so (`schedule.sums`, `schedule.gathers`, `World.complete`), all else in rounds of `ppermute`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_flow.backends.jax.schedule import Sums, along, by_key, gathers, in_rounds, likeness, sums
from keras_flow.boxing.blocks import local_slices
from keras_flow.boxing.messages import WRITES, Piece
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout

#: rank -> a piece of it; all of one shape
Pieces = Mapping[int, Piece]
#: what a rank is to make of values: the same for ranks that do the same
Recipe = Hashable
#: [dims + 1]: where a piece starts, as `Buffer.start` says; numbers where it is the same on all ranks
Start = jax.Array | tuple[int, ...]


@dataclass(frozen=True)
class World:
    """The ranks of a program.

    Attributes:
        ranks: in the order of their places.
        axes: names of the mesh's axes.
        sizes: their sizes.
        on_axes: whether these are the placement's.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    on_axes: bool

    def me(self) -> jax.Array:
        """The place of this rank."""
        return lax.axis_index(self.axes)

    def of_rank(self, rows: Sequence) -> jax.Array:
        """This rank's row of a table."""
        return jnp.asarray(np.array(rows, np.int32))[self.me()]

    def chosen(self, recipes: Mapping[int, Recipe], make: Callable[..., jax.Array], is_cheap: bool) -> jax.Array:
        """`make(recipe)` by this rank's recipe; of a rank without one by any.

        Args:
            recipes: by rank.
            make: the same shape for all recipes.
            is_cheap: whether ranks may make two recipes and select; else each makes its own, in a branch of a `switch`.
        """
        kinds = list(dict.fromkeys(recipes.values()))
        if len(kinds) == 1:
            return make(kinds[0])
        which = self.of_rank([kinds.index(recipes.get(rank, kinds[0])) for rank in self.ranks])
        if is_cheap and len(kinds) == 2:
            return lax.select_n(which, *map(make, kinds))
        return lax.switch(which, [functools.partial(make, kind) for kind in kinds])

    def along(self, names: Sequence[str]) -> dict[int, list[int]]:
        """For each rank those that differ from it on some axes only, the first of them slowest."""
        return along(self.ranks, self.sizes, [self.axes.index(name) for name in names])

    def complete(self, pairs: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """The axes along which each rank sends one message to each, itself included; none where they do not so."""
        if len(set(pairs)) != len(pairs):
            return ()
        for chosen in range(1, 2 ** len(self.axes)):
            names = tuple(name for number, name in enumerate(self.axes) if chosen >> number & 1)
            if set(pairs) == {(one, other) for one, others in self.along(names).items() for other in others}:
                return names
        return ()

    def carried(self, message: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """What comes to each rank of its sender; zeros where nothing does."""
        if all(sender == receiver for sender, receiver in pairs):
            return message
        place = {rank: number for number, rank in enumerate(self.ranks)}
        return lax.ppermute(message, self.axes, [(place[one], place[other]) for one, other in pairs])


@dataclass
class Buffer:
    """A shard that is being filled.

    Attributes:
        layout: of which it is a shard.
        world: the ranks.
        held: what it is, where that is known.
        come: else what came: values [*shape_of] and the pieces that they are, by rank; a rank that is not there got
            none. Values for one piece are added.
    """

    layout: Layout
    world: World
    held: jax.Array | None = None
    come: list[tuple[jax.Array, Pieces]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.world.ranks[0])

    def start(self, rank: int, piece: Piece) -> tuple[int, ...]:
        """Where a piece's box starts in the shard, and the piece in its box; of rows of a box: where they start."""
        first, *rest = [*(one.start for one in local_slices(piece.box, self.layout, rank)), piece.start]
        row = _row(piece)
        return (first, *rest) if row is None else (first + piece.start // row, *rest[:-1], 0)

    def take(self, values: jax.Array, pieces: Pieces) -> None:
        """What came. It is added where it is for the same ranks as what came before."""
        for number, (before, of) in enumerate(self.come):
            if of == pieces:
                if len(of) < len(self.world.ranks):  # the others, which read nothing, do not touch memory
                    mine = self.world.of_rank([rank in of for rank in self.world.ranks]) != 0
                    self.come[number] = lax.cond(mine, operator.add, lambda _, values: values, before, values), of
                else:
                    self.come[number] = before + values, of
                return
        self.come.append((values, pieces))

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces that a rank has, as they lie in its shard."""
        return sorted(
            {pieces[rank] for _, pieces in self.come if rank in pieces}, key=lambda piece: self.start(rank, piece)
        )

    def numbers(self, rank: int, piece: Piece) -> tuple[int, ...]:
        """Which of what came to a rank is to be added for a piece."""
        return tuple(number for number, (_, pieces) in enumerate(self.come) if pieces.get(rank) == piece)

    def read(self, pieces: Pieces) -> jax.Array:
        """The piece of this rank [*shape_of]."""
        like = next(iter(pieces.values()))
        if self.held is None:
            numbers = {rank: self.numbers(rank, piece) for rank, piece in pieces.items()}
            if all(numbers.values()):
                return self.world.chosen(numbers, self._added, is_cheap=True)
        starts = {rank: self.start(rank, piece) for rank, piece in pieces.items()}
        at = starts[next(iter(starts))]
        if len(set(starts.values())) > 1:
            at = self.world.of_rank([starts.get(rank, at) for rank in self.world.ranks])
        return _read(self.value(), like, at)

    def value(self) -> jax.Array:
        """The shard; zeros where nothing came."""
        if self.held is not None:
            return self.held
        recipes = {
            rank: tuple(
                (_cut(piece), self.start(rank, piece), self.numbers(rank, piece)) for piece in self.pieces(rank)
            )
            for rank in self.world.ranks
        }
        is_whole = all(len(recipe) == 1 and recipe[0][0] == self.shape for recipe in recipes.values())
        return self.world.chosen(recipes, self._filled, is_cheap=is_whole)

    def _added(self, numbers: tuple[int, ...]) -> jax.Array:
        """The sum of some of what came."""
        return functools.reduce(operator.add, [self.come[number][0] for number in numbers])

    def _filled(self, recipe: tuple) -> jax.Array:
        """The shard of a recipe: how the pieces are cut, where they start, what is added for each."""
        blocks = [(start, self._added(numbers)) for _, start, numbers in recipe]
        made = _line(blocks, self.shape)
        if made is None:
            made = jnp.zeros(self.shape, self.come[0][0].dtype)
            for (cut, _, _), (start, value) in zip(recipe, blocks, strict=True):
                made = _written(made, cut, start, value)
        return made


def alike(step: Step, held: jax.Array, world: World) -> jax.Array:
    """Run an exchange; takes and gives a shard, laid flat."""
    source = step.exchange.source
    buffers = {"source": Buffer(source, world, held.reshape(source.local_shape(world.ranks[0])))}
    for phase in step.phases:
        name = WRITES[phase]
        writes = buffers.setdefault(name, Buffer(step.exchange.layout_of(name), world))
        made = sums(step) if phase == "reduce" and world.on_axes else None
        if made is not None:
            _scatter(step, made, buffers["source"], writes)
        elif phase == "gather" and world.on_axes and _has_all(step, writes):
            _gather(step, writes)
        else:
            _send(step, phase, buffers, writes)
    return buffers["result"].value().reshape(-1)


def _send(step: Step, phase: str, buffers: Mapping[str, Buffer], writes: Buffer) -> None:
    """The messages of a phase."""
    come = []
    for messages in by_key(step, phase, writes.world.ranks, likeness):
        pairs, parts = list(messages), list(messages.values())
        likes = parts[0]

        def read(of: Mapping[int, int], parts=parts, likes=likes) -> jax.Array:
            found = [
                buffers[like.origin].read({sender: parts[number][k].piece for sender, number in of.items()})
                for k, like in enumerate(likes)
            ]
            return found[0] if len(found) == 1 else jnp.concatenate([values.reshape(-1) for values in found])

        for message, numbers in _transport(writes.world, pairs, read):
            done = 0
            for k, like in enumerate(likes):
                values = message if len(likes) == 1 else message[done : done + like.piece.size]
                done += like.piece.size
                pieces = {receiver: parts[number][k].piece for receiver, number in numbers.items()}
                come.append((values.reshape(shape_of(like.piece)), pieces))
    for values, pieces in come:  # not before all are read, which is from what came before
        writes.take(values, pieces)


def _transport(
    world: World, pairs: Sequence[tuple[int, int]], read: Callable[[Mapping[int, int]], jax.Array]
) -> list[tuple[jax.Array, dict[int, int]]]:
    """Send messages (sender, receiver) of one size.

    Args:
        world: the ranks.
        pairs: the messages.
        read: given the number of a message for each sender, these messages.

    Returns:
        Messages, each with its number on the ranks that receive it.
    """
    names = world.complete(pairs)
    if names and len(pairs) > len(world.ranks):
        number_of = {pair: number for number, pair in enumerate(pairs)}
        members = world.along(names)
        size = len(members[world.ranks[0]])
        blocks = [read({rank: number_of[rank, members[rank][k]] for rank in world.ranks}) for k in range(size)]
        blocks = lax.all_to_all(jnp.stack(blocks), names, 0, 0)
        return [(blocks[k], {rank: number_of[members[rank][k], rank] for rank in world.ranks}) for k in range(size)]
    come = []
    for found in in_rounds(pairs, world.ranks):
        message = read({pairs[number][0]: number for number in found})
        message = world.carried(message, [pairs[number] for number in found])
        come.append((message, {pairs[number][1]: number for number in found}))
    return come


def _scatter(step: Step, made: Sequence[Sums], source: Buffer, writes: Buffer) -> None:
    """The sums, by a reduce-scatter, sent on where others want them."""
    exchange, world = step.exchange, source.world
    names = tuple(world.axes[axis] for axis in exchange.source_blocks.partial_axes if axis not in exchange.apart)
    members = world.along(names)
    blocks = [
        source.read({rank: one[members[rank][number]][1] for rank in members})
        for number in range(exchange.summand_count)
        for one in made
    ]
    summed = lax.psum_scatter(jnp.concatenate(blocks), names, tiled=True)
    summed = summed.reshape(len(made), *blocks[0].shape)
    ways = [(maker, receiver) for one in made for maker, (receiver, _) in one.items()]
    pieces = [piece for one in made for _, piece in one.values()]
    slots = [slot for slot, one in enumerate(made) for _ in one]

    def read(of: Mapping[int, int]) -> jax.Array:
        chosen = [slots[of[rank]] if rank in of else 0 for rank in world.ranks]
        if len({slots[number] for number in of.values()}) == 1:
            return summed[slots[next(iter(of.values()))]]
        return lax.dynamic_index_in_dim(summed, world.of_rank(chosen), keepdims=False)

    for values, numbers in _transport(world, ways, read):
        writes.take(values, {receiver: pieces[number] for receiver, number in numbers.items()})


def _has_all(step: Step, writes: Buffer) -> bool:
    """Whether ranks have, as it came, what they are to give."""
    gives = gathers(step)
    return gives is not None and all(frozenset(writes.pieces(rank)) == gives[rank] for rank in gives)


def _gather(step: Step, writes: Buffer) -> None:
    """All that ranks have of a target cell to all that want it, by one all-gather."""
    cells, world = step.exchange.target_blocks, writes.world
    have = {rank: writes.pieces(rank) for rank in world.ranks}
    names = tuple(world.axes[axis] for axis in cells.copy_axes)
    numbers = range(len(have[world.ranks[0]]))
    blocks = jnp.stack([writes.read({rank: have[rank][number] for rank in have}) for number in numbers])
    blocks = lax.all_gather(blocks, names)
    members = world.along(names)
    writes.come = [
        (blocks[place, number], {rank: have[members[rank][place]][number] for rank in world.ranks})
        for place in range(len(blocks))
        for number in numbers
    ]


def _row(piece: Piece) -> int | None:
    """Elements of a row of its box, where a piece is some rows of it."""
    row = math.prod(piece.box_shape[1:])
    return row if piece.box_shape and row and not (piece.start % row or piece.size % row) else None


def _cut(piece: Piece) -> tuple[int, ...]:
    """Shape of the part of a shard in which a piece lies: its rows, else its box."""
    row = _row(piece)
    return piece.box_shape if row is None else (piece.size // row, *piece.box_shape[1:])


def shape_of(piece: Piece) -> tuple[int, ...]:
    """The shape in which a piece travels: that of its rows; else it is laid flat, which takes XLA twice as long."""
    return (piece.size,) if _row(piece) is None else _cut(piece)


def _read(shard: jax.Array, piece: Piece, at: Start) -> jax.Array:
    """A piece of a shard, from where it starts."""
    region = lax.dynamic_slice(shard, tuple(at[:-1]), _cut(piece))
    return region if _row(piece) is not None else lax.dynamic_slice(region.reshape(-1), (at[-1],), (piece.size,))


def _written(shard: jax.Array, cut: tuple[int, ...], at: tuple[int, ...], values: jax.Array) -> jax.Array:
    """The shard with other values for a piece."""
    *starts, first = at
    if values.shape != cut:
        region = lax.dynamic_slice(shard, starts, cut).reshape(-1)
        values = lax.dynamic_update_slice(region, values, (first,)).reshape(cut)
    return lax.dynamic_update_slice(shard, values, starts)


def _line(blocks: Sequence[tuple[tuple[int, ...], jax.Array]], shape: tuple[int, ...]) -> jax.Array | None:
    """Blocks, each with its start, joined along one dim; None where they do not make the shape so.

    Not along two: what XLA joins first it writes twice.
    """
    values = [values for _, values in blocks]
    if len(values) == 1:
        return values[0] if values[0].shape == shape else None
    dims = {dim for start, _ in blocks for dim in range(len(shape)) if start[dim]}
    if len(dims) != 1 or any(one.ndim != len(shape) for one in values):
        return None
    (dim,) = dims
    others = {one.shape[:dim] + one.shape[dim + 1 :] for one in values}
    fills = sum(one.shape[dim] for one in values) == shape[dim] and others == {shape[:dim] + shape[dim + 1 :]}
    return jnp.concatenate(values, dim) if fills else None
