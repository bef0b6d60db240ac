"""Running a step with arrays that cannot be written into: pieces are cut, sent, added and joined again.

Engines that drive all ranks from one process share it; what they do with an array is an `Ops` object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from keras_flow.boxing.cells import Box, volume
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.pieces import Piece
from keras_flow.boxing.simulate import local_slices
from keras_flow.boxing.spec import Step
from keras_flow.layout import Layout

Array = TypeVar("Array")


class Ops(Protocol, Generic[Array]):
    """What an engine does with its arrays."""

    def cut(self, shard: Array, slices: tuple[slice, ...], start: int, stop: int, rank: int) -> Array:
        """Elements `start` to `stop`, in row-major order, of a region of a shard: an array [stop - start]."""
        ...

    def send(self, values: Array, sender: int, receiver: int) -> Array:
        """The values on the device of `receiver`."""
        ...

    def add(self, one: Array, other: Array, rank: int) -> Array:
        """The sum, on the device of `rank`."""
        ...

    def zeros(self, size: int, like: Array, rank: int) -> Array:
        """Zeros [size] of the dtype of `like`, on the device of `rank`."""
        ...

    def join(self, values: list[Array], dim: int, rank: int) -> Array:
        """Arrays joined along a dim, on the device of `rank`."""
        ...

    def shape(self, values: Array, shape: tuple[int, ...], rank: int) -> Array:
        """The values in another shape, on the device of `rank`."""
        ...


def run_step(ops: Ops[Array], step: Step, shards: Mapping[int, Array]) -> dict[int, Array]:
    """The shards after one step, from those before it, for all ranks."""
    exchange = step.exchange
    combined: dict[tuple[int, Piece], Array] = {}
    result: dict[int, dict[Piece, Array]] = {rank: {} for rank in exchange.target.placement.ranks}
    remembered: dict[tuple[int, Piece], Array] = {}
    for phase in step.phases:
        receivers = exchange.source if phase == "combine" else exchange.target
        arrived = []
        for receiver in receivers.placement.ranks:
            for transfer in exchange.receives(receiver, phase):
                key = (transfer.sender, transfer.piece)
                if transfer.origin == "combined":
                    values = combined[key]
                elif transfer.origin == "result":
                    values = result[transfer.sender][transfer.piece]
                else:
                    values = remembered.get(key)
                    if values is None:
                        values = _cut(ops, exchange.source, shards[transfer.sender], *key)
                        remembered[key] = values
                if transfer.sender != receiver:
                    values = ops.send(values, transfer.sender, receiver)
                arrived.append((receiver, transfer.piece, values))
        for receiver, piece, values in arrived:
            if phase == "combine":
                key = (receiver, piece)
                combined[key] = ops.add(combined[key], values, receiver) if key in combined else values
            else:
                have = result[receiver]
                have[piece] = ops.add(have[piece], values, receiver) if piece in have else values
    like = next(iter(shards.values()))
    return {rank: _join(ops, exchange, rank, pieces, like) for rank, pieces in result.items()}


def _cut(ops: Ops[Array], layout: Layout, shard: Array, rank: int, piece: Piece) -> Array:
    return ops.cut(shard, local_slices(piece.box, layout, rank), piece.start, piece.stop, rank)


def _join(ops: Ops[Array], exchange: Exchange, rank: int, pieces: Mapping[Piece, Array], like: Array) -> Array:
    """The target's shard of `rank` from its pieces: atoms from ranges, then the shard from atoms, dim by dim."""
    box = exchange.of_target.box_at(exchange.of_target.coords_of(rank))
    shape = tuple(stop - start for start, stop in box)
    if volume(box) == 0:
        return ops.shape(ops.zeros(0, like, rank), shape, rank)
    of_atom: dict[Box, list[tuple[Piece, Array]]] = {}
    for piece, values in pieces.items():
        of_atom.setdefault(piece.box, []).append((piece, values))
    blocks: dict[Box, Array] = {}
    for _, atom in exchange.of_source.overlapping(box):
        parts, done = [], 0
        for piece, values in sorted(of_atom.get(atom, []), key=lambda pair: pair[0].start):
            if piece.start > done:  # another rank of the family keeps this range
                parts.append(ops.zeros(piece.start - done, like, rank))
            parts.append(values)
            done = piece.stop
        if done < volume(atom):
            parts.append(ops.zeros(volume(atom) - done, like, rank))
        flat = parts[0] if len(parts) == 1 else ops.join(parts, 0, rank)
        blocks[atom] = ops.shape(flat, tuple(stop - start for start, stop in atom), rank)
    for dim in reversed(range(len(shape))):
        rows: dict[Box, list[tuple[int, Array]]] = {}
        for atom, block in blocks.items():
            rows.setdefault((*atom[:dim], box[dim], *atom[dim + 1 :]), []).append((atom[dim][0], block))
        blocks = {}
        for row, found in rows.items():
            ordered = [block for _, block in sorted(found, key=lambda pair: pair[0])]
            blocks[row] = ordered[0] if len(ordered) == 1 else ops.join(ordered, dim, rank)
    return next(iter(blocks.values()))
