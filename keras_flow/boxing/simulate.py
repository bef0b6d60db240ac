"""The reference executor: all ranks in one process, on numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from keras_flow.boxing.blocks import Blocks, Box
from keras_flow.boxing.json_form import from_json
from keras_flow.boxing.messages import WRITES, Piece
from keras_flow.boxing.spec import BoxingPlan, Step
from keras_flow.errors import FlowError
from keras_flow.layout import Layout

#: what the executor counts: rank -> elements received from others
Counts = dict[int, int]


def simulate(
    plan: BoxingPlan | Mapping,
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
    read = from_json(data)
    check_shards(read.source, shards, read.source.placement.ranks)
    held = {rank: np.asarray(shards[rank]) for rank in read.source.placement.ranks}
    dtype = next(iter(held.values())).dtype
    if check_copies:
        _check_copies(read.source, held, "the shards given")
    for number, step in enumerate(read.steps):
        held = _run(step, held, dtype, counts)
        if check_copies:
            _check_copies(step.exchange.target, held, f"after step {number} ({step})")
    return held


def _check_copies(layout: Layout, shards: Mapping[int, np.ndarray], where: str) -> None:
    """Whether ranks that differ only along axes with B hold equal shards (up to rounding: copies may add in other
    orders)."""
    cells = Blocks(layout)
    if not cells.copy_axes:
        return
    first: dict[tuple[int, ...], int] = {}
    for rank in layout.placement.ranks:
        at = cells.coords_of(rank)
        same = first.setdefault(tuple(at[axis] for axis in at if axis not in cells.copy_axes), rank)
        if not np.allclose(shards[same], shards[rank], rtol=1e-6, atol=1e-9, equal_nan=True):
            raise FlowError(
                f"{where}: ranks {same} and {rank} differ only along axes with B, so the layout {layout} promises that "
                "they hold equal shards; they do not"
            )


def _run(step: Step, held: dict[int, np.ndarray], dtype: np.dtype, counts: Counts | None) -> dict[int, np.ndarray]:
    """One step: its phases one after the other, all messages of a phase at once."""
    exchange = step.exchange
    buffers = {"source": held}
    for phase in step.phases:
        name = WRITES[phase]
        layout = exchange.layout_of(name)
        if name not in buffers:
            buffers[name] = {rank: np.zeros(layout.local_shape(rank), dtype) for rank in layout.placement.ranks}
        transfers = [
            (receiver, part) for receiver in layout.placement.ranks for part in exchange.receives(receiver, phase)
        ]
        sent = []
        for _, transfer in transfers:
            origin = exchange.layout_of(transfer.origin)
            sent.append(_read(buffers[transfer.origin][transfer.sender], origin, transfer.sender, transfer.piece))
        for (receiver, transfer), values in zip(transfers, sent, strict=True):
            _add(buffers[name][receiver], layout, receiver, transfer.piece, values)
            if counts is not None and transfer.sender != receiver:
                counts[receiver] = counts.get(receiver, 0) + transfer.piece.size
    return buffers[WRITES[step.phases[-1]]]


def check_shards(layout: Layout, shards: Mapping[int, Any], ranks: Iterable[int]) -> None:
    """Whether there is a shard of the right shape for each of the ranks."""
    for rank in ranks:
        if rank not in shards or tuple(np.shape(shards[rank])) != layout.local_shape(rank):
            found = f"shape {list(np.shape(shards[rank]))}" if rank in shards else "none"
            raise FlowError(f"shard of rank {rank}: expected shape {list(layout.local_shape(rank))}, found {found}")


def local_slices(box: Box, layout: Layout, rank: int) -> tuple[slice, ...]:
    """A box of the logical tensor within the shard of a rank."""
    return tuple(
        slice(start - whole.start, stop - whole.start)
        for (start, stop), whole in zip(box, layout.local_slices(rank), strict=True)
    )


def _read(shard: np.ndarray, layout: Layout, rank: int, piece: Piece) -> np.ndarray:
    return shard[(*local_slices(piece.box, layout, rank), ...)].reshape(-1)[piece.start : piece.stop].copy()


def _add(shard: np.ndarray, layout: Layout, rank: int, piece: Piece, values: np.ndarray) -> None:
    region = shard[(*local_slices(piece.box, layout, rank), ...)]  # the ellipsis keeps a view where there is no dim
    flat = region.reshape(-1).copy()
    flat[piece.start : piece.stop] += values
    region[...] = flat.reshape(region.shape)
