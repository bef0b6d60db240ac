"""The reference executor: a plan run on numpy arrays, all ranks in one process.

It is made to be read, and to check the executors of the engines: every message is copied out of a buffer and added into
another, and copies are compared after each step. `tests/boxing/test_independent.py` has a second one, written from
docs/boxing-spec.md alone.

    >>> from keras_flow.boxing import plan
    >>> from keras_flow.placements import Placement
    >>> pair = Placement([0, 1])
    >>> planned = plan(Layout(pair, "P", (2,)), Layout(pair, "S(0)", (2,)))
    >>> out = simulate(planned, {0: np.array([1, 2]), 1: np.array([10, 20])})
    >>> {rank: shard.tolist() for rank, shard in out.items()}
    {0: [11], 1: [22]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from keras_flow.boxing.blocks import Blocks, local_slices
from keras_flow.boxing.messages import Piece
from keras_flow.boxing.phases import receives
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
from keras_flow.errors import FlowError
from keras_flow.layout import Layout

#: what the executor counts: rank -> elements received from others
Counts = dict[int, int]


def simulate(
    plan: BoxingPlan | Mapping[str, object],
    shards: Mapping[int, np.ndarray],
    *,
    counts: Counts | None = None,
    check_copies: bool = True,
) -> dict[int, np.ndarray]:
    """Run a plan on numpy shards. Only the plan's JSON form is read.

    Args:
        plan: the plan, or its JSON form.
        shards: rank -> array of the source layout's local shape.
        counts: if given, elements that each rank received are added here.
        check_copies: whether the shards given, and those after each step, are checked to be equal on ranks that differ
            only along axes with B, as every layout promises.

    Returns:
        rank -> array of the target layout's local shape.

    Raises:
        FlowError: a rank's shard is missing or has another shape, or copies are not equal.
    """
    data = plan.to_json() if isinstance(plan, BoxingPlan) else plan
    read = BoxingPlan.from_json(data)  # so that nothing can be read but what the specification has
    check_shards(read.source, shards, read.source.placement.ranks)
    current = {rank: np.asarray(shards[rank]) for rank in read.source.placement.ranks}
    dtype = next(iter(current.values())).dtype
    if check_copies:
        _check_copies(read.source, current, "the shards given")
    for number, step in enumerate(read.steps):
        current = _run(step, current, dtype, counts)
        if check_copies:
            _check_copies(step.exchange.target, current, f"after step {number} ({step})")
    return current


def _check_copies(layout: Layout, shards: Mapping[int, np.ndarray], where: str) -> None:
    """Check that ranks that differ only along axes with B hold equal shards.

    They may differ by rounding, as copies may be added in other orders.

    Raises:
        FlowError: they differ by more.
    """
    blocks = Blocks(layout)
    if not blocks.copy_axes:
        return
    first: dict[tuple[int, ...], int] = {}
    for rank in layout.placement.ranks:
        at = blocks.coords_of(rank)
        same = first.setdefault(tuple(at[axis] for axis in at if axis not in blocks.copy_axes), rank)
        if not np.allclose(shards[same], shards[rank], rtol=1e-6, atol=1e-9, equal_nan=True):
            raise FlowError(
                f"{where}: ranks {same} and {rank} differ only along axes with B, so the layout {layout} promises that "
                "they hold equal shards; they do not"
            )


def _run(step: Step, shards: dict[int, np.ndarray], dtype: np.dtype, counts: Counts | None) -> dict[int, np.ndarray]:
    """One step: its phases one after the other, and all messages of a phase at once."""
    exchange = step.exchange
    target = exchange.target
    result = {rank: np.zeros(target.local_shape(rank), dtype) for rank in target.placement.ranks}
    buffers = {"source": shards, "result": result}
    for phase in step.phases:
        messages = [message for rank in target.placement.ranks for message in receives(exchange, rank, phase)]
        sent: list[np.ndarray] = []
        for message in messages:  # all are read before any is added: a buffer may be read and written in one phase
            buffer = buffers[message.origin][message.sender]
            sent.append(_read(buffer, exchange.layout_of(message.origin), message.sender, message.piece))
        for message, values in zip(messages, sent, strict=True):
            _add(result[message.receiver], target, message.receiver, message.piece, values)
            if counts is not None and message.sender != message.receiver:
                counts[message.receiver] = counts.get(message.receiver, 0) + message.piece.size
    return result


def check_shards(layout: Layout, shards: Mapping[int, object], ranks: Iterable[int]) -> None:
    """Check that there is a shard of the right shape for each of the ranks.

    Raises:
        FlowError: one is missing or has another shape.
    """
    for rank in ranks:
        if rank not in shards or tuple(np.shape(cast(ArrayLike, shards[rank]))) != layout.local_shape(rank):
            found = f"shape {list(np.shape(cast(ArrayLike, shards[rank])))}" if rank in shards else "none"
            raise FlowError(f"shard of rank {rank}: expected shape {list(layout.local_shape(rank))}, found {found}")


def _read(shard: np.ndarray, layout: Layout, rank: int, piece: Piece) -> np.ndarray:
    return shard[(*local_slices(piece.box, layout, rank), ...)].reshape(-1)[piece.start : piece.stop].copy()


def _add(shard: np.ndarray, layout: Layout, rank: int, piece: Piece, values: np.ndarray) -> None:
    region = shard[(*local_slices(piece.box, layout, rank), ...)]  # the ellipsis keeps a view where there is no dim
    # a piece may be a range of a region that is not contiguous in the shard
    flat = region.reshape(-1).copy()
    flat[piece.start : piece.stop] += values
    region[...] = flat.reshape(region.shape)
