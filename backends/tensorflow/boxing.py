"""Boxing on TensorFlow: plain operations on each rank's device, in one cached function for each plan.

DTensor's relayout supports neither uneven nor partial tensors; raw collectives have no reduce-scatter on CPU, and one
that fails poisons those after it. Plain operations move what the plan says and no more.

TensorFlow's tensors cannot be written into. So a shard is not filled in place: its pieces are cut out at their senders,
moved, added, and at the end concatenated into the target's shard. Between processes pieces travel in the runtime's
sends, one for each phase and pair of ranks: what the plan says, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_flow.backends.tensorflow import collectives
from keras_flow.backends.tensorflow.devices import rank_devices, world
from keras_flow.boxing.blocks import Box, local_slices, volume
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Message, Piece
from keras_flow.boxing.phases import receives, sends
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout


def redistribute(plan: BoxingPlan, shards: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """Run a plan; shards by rank, all ranks of this process. Each process that has ranks of the plan calls it."""
    mine = world().local_ranks
    # source and target hold the same elements on the same ranks: nothing moves, nothing is compiled
    if not plan.steps or not set(plan.ranks) & set(mine):
        return dict(shards)
    devices = rank_devices()
    ordered = [shards[rank] for rank in plan.source.placement.ranks if rank in mine]
    function = program(plan, ordered[0].dtype if ordered else tf.as_dtype(plan.dtype))
    if set(plan.ranks) <= set(mine):
        results = function(*ordered)
    else:
        # gradients are those of global tensors: a tape that saw a send would ask for its gradient, and fail
        given = [tf.stop_gradient(shard) for shard in ordered]
        results = collectives.run_within_limit(f"boxing {plan.source} -> {plan.target}", function, given)
    out = {}
    targets = [rank for rank in plan.target.placement.ranks if rank in mine]
    for rank, value in zip(targets, results[: len(targets)], strict=True):
        with tf.device(devices[rank]):  # a function's results come back on the first device
            out[rank] = tf.identity(value)
    return out


@functools.lru_cache(maxsize=256)
def program(plan: BoxingPlan, dtype: tf.DType):
    """This process's part of a plan, as a function.

    It takes the shards of its ranks in the order of the source's ranks, and gives them in that of the target's.
    """
    devices, mine = rank_devices(), world().local_ranks
    ranks, targets = (
        [rank for rank in layout.placement.ranks if rank in mine] for layout in (plan.source, plan.target)
    )

    def run(*shards):
        by_rank = dict(zip(ranks, shards, strict=True))
        sent: list[tf.Tensor] = []
        for number, step in enumerate(plan.steps):
            by_rank = _run_step(step, by_rank, devices, dtype, f"boxing {number}", sent)
        with tf.control_dependencies(sent):  # a function drops operations that nobody reads
            held = []
            for rank in targets:
                with tf.device(devices[rank]):  # on no device of its own it would pass through the first one
                    held.append(tf.identity(by_rank[rank]))
            # a process that sends and holds nothing afterwards has a number that nobody needs, for its sends
            return tuple(held) or (tf.constant(0),)

    # not tf.function: it passes every output through the first device, which moves all results twice more
    return tf.compat.v1.wrap_function(run, [tf.TensorSpec(plan.source.local_shape(rank), dtype) for rank in ranks])


def _run_step(
    step: Step,
    shards: Mapping[int, tf.Tensor],
    devices: tuple[str, ...],
    dtype: tf.DType,
    what: str,
    sent: list[tf.Tensor],
) -> dict[int, tf.Tensor]:
    """The shards of this process's ranks after one step, from those before it; for the last two see `_exchanged`."""
    exchange, mine = step.exchange, set(world().local_ranks)
    has_others = not mine.issuperset(exchange.target.placement.ranks)
    # what each rank has of each buffer, piece by piece; a piece that several receivers want is cut once
    source: dict[tuple[int, Piece], tf.Tensor] = {}
    result: dict[int, dict[Piece, tf.Tensor]] = {rank: {} for rank in exchange.target.placement.ranks if rank in mine}

    def values_of(message: Message) -> tf.Tensor:
        """The values of a piece, on the device of its sender."""
        sender, piece = message.sender, message.piece
        if message.origin == "result":
            return result[sender][piece]
        if (sender, piece) not in source:
            with tf.device(devices[sender]):
                source[sender, piece] = _cut(exchange.source, shards[sender], sender, piece)
        return source[sender, piece]

    for phase in step.phases:
        # of the ranks of this process alone: a plan of 1,024 ranks has a million messages
        leaving = [message for rank in mine for message in sends(exchange, rank, phase)] if has_others else []
        arriving = [message for rank in result for message in receives(exchange, rank, phase)]
        by_mail = _exchanged(
            [(message, values_of(message)) for message in leaving if message.receiver not in mine],
            [message for message in arriving if message.sender not in mine],
            devices,
            f"{what} {phase} ",
            dtype,
            sent,
        )
        arrived: list[tuple[int, Piece, tf.Tensor]] = []
        for message in arriving:
            values = by_mail[message] if message.sender not in mine else values_of(message)
            if message.sender != message.receiver:
                with tf.device(devices[message.receiver]):  # TensorFlow copies an input that is on another device
                    values = tf.identity(values)
            arrived.append((message.receiver, message.piece, values))
        # all messages of a phase are read before any is added
        for receiver, piece, values in arrived:
            with tf.device(devices[receiver]):
                pieces = result[receiver]
                pieces[piece] = _add(pieces[piece], values) if piece in pieces else values
    after = {}
    for rank, pieces in result.items():
        with tf.device(devices[rank]):
            after[rank] = _assembled(exchange, rank, pieces, dtype)
    return after


def _exchanged(
    leaving: Sequence[tuple[Message, tf.Tensor]],
    arriving: Sequence[Message],
    devices: tuple[str, ...],
    what: str,
    dtype: tf.DType,
    sent: list[tf.Tensor],
) -> dict[Message, tf.Tensor]:
    """Send pieces to ranks of other processes, and receive those from them: one transfer for each pair of ranks.

    Args:
        leaving: what is sent, with the values.
        arriving: what is received.
        devices: those of all ranks.
        what: tells the transfers of this phase from those of others.
        dtype: that of the values.
        sent: a list to which the operations that send are added.
    """
    posted: dict[tuple[int, int], list[tf.Tensor]] = {}
    for message, values in sorted(leaving, key=lambda pair: pair[0].order):
        posted.setdefault((message.sender, message.receiver), []).append(values)
    for (sender, receiver), parts in posted.items():
        with tf.device(devices[sender]):
            sent.append(collectives.send(_concatenated(parts, 0), sender, receiver, what))
    expected: dict[tuple[int, int], list[Message]] = {}
    for message in sorted(arriving, key=lambda message: message.order):
        expected.setdefault((message.sender, message.receiver), []).append(message)
    found: dict[Message, tf.Tensor] = {}
    for (sender, receiver), messages in expected.items():
        sizes = [message.piece.size for message in messages]
        with tf.device(devices[receiver]):
            flat = collectives.received(sum(sizes), dtype, sender, receiver, what)
            found.update(zip(messages, tf.split(flat, sizes), strict=True))
    return found


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
