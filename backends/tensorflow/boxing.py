"""Boxing on TensorFlow: plain operations on each rank's device, in one cached function for each plan.

DTensor's relayout supports neither uneven nor partial tensors; raw collectives have no reduce-scatter on CPU, and one
that fails poisons those after it. Plain operations move what the plan says and no more.

TensorFlow's tensors cannot be written into. So a shard is not filled in place: its pieces are cut out at their senders,
moved, added, and at the end concatenated into the target's shard.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tensorflow as tf

from keras_flow.backends.tensorflow.devices import rank_devices
from keras_flow.boxing.blocks import Box, local_slices, volume
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Piece
from keras_flow.boxing.phases import receives
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout


def redistribute(plan: BoxingPlan, shards: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """Run a plan; shards by rank, all ranks of this host."""
    # source and target hold the same elements on the same ranks: nothing moves, nothing is compiled
    if not plan.steps:
        return dict(shards)
    devices = rank_devices()
    ordered = [shards[rank] for rank in plan.source.placement.ranks]
    results = program(plan, ordered[0].dtype)(*ordered)
    out = {}
    for rank, value in zip(plan.target.placement.ranks, results, strict=True):
        with tf.device(devices[rank]):  # a function's results come back on the first device
            out[rank] = tf.identity(value)
    return out


@functools.lru_cache(maxsize=256)
def program(plan: BoxingPlan, dtype: tf.DType):
    """The function of a plan: shards in the order of the source's ranks to shards in that of the target's."""
    devices = rank_devices()
    ranks = plan.source.placement.ranks

    def run(*shards):
        by_rank = dict(zip(ranks, shards, strict=True))
        for step in plan.steps:
            by_rank = _run_step(step, by_rank, devices)
        return tuple(by_rank[rank] for rank in plan.target.placement.ranks)

    # not tf.function: it passes every output through the first device, which moves all results twice more
    return tf.compat.v1.wrap_function(run, [tf.TensorSpec(plan.source.local_shape(rank), dtype) for rank in ranks])


def _run_step(step: Step, shards: Mapping[int, tf.Tensor], devices: tuple[str, ...]) -> dict[int, tf.Tensor]:
    """The shards of all ranks after one step, from those before it."""
    exchange = step.exchange
    # what each rank has of each buffer, piece by piece; a piece that several receivers want is cut once
    source: dict[tuple[int, Piece], tf.Tensor] = {}
    combined: dict[tuple[int, Piece], tf.Tensor] = {}
    result: dict[int, dict[Piece, tf.Tensor]] = {rank: {} for rank in exchange.target.placement.ranks}
    for phase in step.phases:
        receivers = exchange.source if phase == "combine" else exchange.target
        arrived = []
        for receiver in receivers.placement.ranks:
            for message in receives(exchange, receiver, phase):
                sender, piece = message.sender, message.piece
                if message.origin == "combined":
                    values = combined[sender, piece]
                elif message.origin == "result":
                    values = result[sender][piece]
                else:
                    if (sender, piece) not in source:
                        with tf.device(devices[sender]):
                            source[sender, piece] = _cut(exchange.source, shards[sender], sender, piece)
                    values = source[sender, piece]
                if sender != receiver:
                    with tf.device(devices[receiver]):  # TensorFlow copies an input that is on another device
                        values = tf.identity(values)
                arrived.append((receiver, piece, values))
        # all messages of a phase are read before any is added
        for receiver, piece, values in arrived:
            with tf.device(devices[receiver]):
                if phase == "combine":
                    key = (receiver, piece)
                    combined[key] = _add(combined[key], values) if key in combined else values
                else:
                    pieces = result[receiver]
                    pieces[piece] = _add(pieces[piece], values) if piece in pieces else values
    dtype = next(iter(shards.values())).dtype
    after = {}
    for rank, pieces in result.items():
        with tf.device(devices[rank]):
            after[rank] = _assembled(exchange, rank, pieces, dtype)
    return after


def _cut(layout: Layout, shard: tf.Tensor, rank: int, piece: Piece) -> tf.Tensor:
    """The elements of a piece [piece.size], from the shard of a rank."""
    # a scalar has no dims to slice, and is its own piece
    slices = local_slices(piece.box, layout, rank)
    return tf.reshape(shard[slices] if slices else shard, [-1])[piece.start : piece.stop]


def _add(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    # booleans cannot be added; a partial sum of them is an "or"
    return tf.logical_or(first, second) if first.dtype == tf.bool else first + second


def _assembled(exchange: Exchange, rank: int, pieces: Mapping[Piece, tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """The target's shard of a rank: pieces are concatenated to atoms, and atoms to the shard, last dim first."""
    # the region of the logical tensor that this rank holds: start and stop of each dim
    box = exchange.target_blocks.box_at(exchange.target_blocks.coords_of(rank))
    if volume(box) == 0:
        return tf.zeros([stop - start for start, stop in box], dtype)
    pieces_of_atom: dict[Box, list[Piece]] = {}
    for piece in pieces:
        pieces_of_atom.setdefault(piece.box, []).append(piece)
    blocks: dict[Box, tf.Tensor] = {}
    for _, atom in exchange.source_blocks.overlapping(box):
        parts, done = [], 0
        for piece in sorted(pieces_of_atom.get(atom, []), key=lambda piece: piece.start):
            if piece.start > done:  # another member of the family keeps this range
                parts.append(tf.zeros([piece.start - done], dtype))
            parts.append(pieces[piece])
            done = piece.stop
        if done < volume(atom):
            parts.append(tf.zeros([volume(atom) - done], dtype))
        blocks[atom] = tf.reshape(_concatenated(parts, 0), [stop - start for start, stop in atom])
    # [[a, b], [c, d]]: first the columns of each row of atoms (a with b, c with d), then the rows
    for dim in reversed(range(len(box))):
        rows: dict[Box, list[tuple[int, tf.Tensor]]] = {}
        for atom, block in blocks.items():
            rows.setdefault((*atom[:dim], box[dim], *atom[dim + 1 :]), []).append((atom[dim][0], block))
        blocks = {}
        for row, located in rows.items():
            ordered = sorted(located, key=lambda pair: pair[0])
            blocks[row] = _concatenated([block for _, block in ordered], dim)
    return next(iter(blocks.values()))


def _concatenated(values: list[tf.Tensor], dim: int) -> tf.Tensor:
    return values[0] if len(values) == 1 else tf.concat(values, dim)
