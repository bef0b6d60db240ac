"""Boxing on torch: collectives of torch.distributed in groups of their own; every rank runs its part of the plan.

An all-reduce and an all-gather of equal shards are torch's own. Everything else is one `all_to_all_single` of packed
pieces for each phase, which on gloo takes uneven and empty pieces too (its list forms do not; DTensor gathers instead).
Pieces travel as bytes, since gloo does not know every dtype; what it cannot add up is added here.

A *recipe* is a step prepared for this rank: which regions it packs for whom, and where it puts what it receives. It is
worked out once for a plan and kept, so that a run only copies, sends and adds.

Example: `S(0) -> S(1)` of 2x2 elements on two ranks. Rank 0 holds the upper row and wants the left column. Its recipe:
send element (0, 1) to rank 1, receive element (1, 0) from it, keep element (0, 0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from keras_flow.backends.torch import simulated
from keras_flow.backends.torch.collectives import REDUCED, as_bytes, as_sent
from keras_flow.backends.torch.devices import rank_devices, world
from keras_flow.backends.torch.layouts import group
from keras_flow.boxing.blocks import local_slices
from keras_flow.boxing.collectives import axis_by_axis, named_step
from keras_flow.boxing.messages import Message, Piece
from keras_flow.boxing.phases import receives, sends
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
from keras_flow.sbp import Split

#: where the elements of a piece are in a shard: a region of it, and start and stop in the flat region
Region = tuple[tuple[slice, ...], int, int]
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def redistribute(plan: BoxingPlan, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Run this rank's part of a plan; every rank of the world calls it, those outside the plan with no shard."""
    if world().is_in_one_process:
        return simulated.redistribute(plan, shards)
    _make_groups(plan)
    rank = world().local_ranks[0]
    if rank not in plan.ranks:
        return {}
    shard = shards.get(rank)
    # a rank that holds nothing of the source still receives: its buffers need a dtype and a device
    like = shard if shard is not None else torch.empty(0, dtype=getattr(torch, plan.dtype), device=rank_devices()[rank])
    for recipe in _recipes(plan, rank):
        shard = recipe.run(shard, like)
    return {rank: shard} if shard is not None else {}


@dataclass(frozen=True)
class _Phase:
    """One phase for one rank: what it packs for whom, and where it puts what it receives.

    `counts_out` and `counts_in` are elements for each member of the group. The bool of a region says whether it is
    written; regions that have a value already are added to.
    """

    sends: tuple[tuple[str, Region], ...]  # buffer, region
    counts_out: tuple[int, ...]
    receives: tuple[tuple[Region, bool], ...]  # in the order of senders
    counts_in: tuple[int, ...]
    keeps: tuple[tuple[str, Region, Region, bool], ...]  # buffer, region there, region of the result


@dataclass(frozen=True)
class _Recipe:
    """One step for one rank, ready to run."""

    step: Step
    rank: int
    members: tuple[int, ...]
    communicates: bool
    native: str | None
    phases: tuple[_Phase, ...]
    target_shape: tuple[int, ...] | None
    is_filled: bool  # whether all of the target's shard is written

    def run(self, shard: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        here = group(self.members) if self.communicates else None
        if self.native == "all_reduce":
            assert shard is not None
            # torch's all-reduce works in place, and the caller's shard stays as it is
            result = shard.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(result, group=here)
            return result
        if self.native == "all_gather":
            assert shard is not None
            return self._all_gather(shard, here)
        buffers: dict[str, torch.Tensor] = {}
        if shard is not None:
            buffers["source"] = shard
        if self.target_shape is not None:
            # zeros cost a pass over memory, so only where something may stay unwritten
            make = torch.empty if self.is_filled else torch.zeros
            buffers["result"] = make(self.target_shape, dtype=like.dtype, device=like.device)
        for phase in self.phases:
            self._exchange(phase, buffers, like, here)
        return buffers.get("result")

    def _exchange(self, phase: _Phase, buffers: dict[str, torch.Tensor], like: torch.Tensor, here) -> None:
        # one message for each receiver, in the order of the group
        packed = [_read(buffers[origin], region) for origin, region in phase.sends]
        # read before anything is written: a phase may read the buffer that it writes
        kept = [_read(buffers[origin], region) for origin, region, *_ in phase.keeps]
        # the same on all ranks of the group, also on one that has nothing to send
        if self.communicates:
            out = torch.cat(packed) if packed else torch.empty(0, dtype=like.dtype, device=like.device)
            arrived = torch.empty(sum(phase.counts_in), dtype=like.dtype, device=like.device)
            incoming, outgoing = (
                [count * like.itemsize for count in each] for each in (phase.counts_in, phase.counts_out)
            )
            dist.all_to_all_single(as_bytes(arrived), as_bytes(out), incoming, outgoing, group=here)
        else:
            arrived = torch.empty(0, dtype=like.dtype, device=like.device)
        for (_, _, region, first), values in zip(phase.keeps, kept, strict=True):
            _write(buffers["result"], region, values, first)
        done = 0
        for region, first in phase.receives:
            size = region[2] - region[1]
            _write(buffers["result"], region, arrived[done : done + size], first)
            done += size

    def _all_gather(self, shard: torch.Tensor, here) -> torch.Tensor:
        """Along one axis: the shards of the group, joined along the dim that it splits."""
        flat = torch.empty((len(self.members), *shard.shape), dtype=shard.dtype, device=shard.device)
        dist.all_gather_single(as_sent(flat), as_sent(shard), group=here)
        source = self.step.exchange.source
        (dim,) = (
            part.dim
            for axis, part in enumerate(source.nd_sbp)
            if isinstance(part, Split) and axis not in self.step.exchange.apart
        )
        # a torch group is sorted by rank, which need not be the order of the blocks
        order = sorted(range(len(flat)), key=lambda k: source.local_slices(self.members[k])[dim].start)
        if dim == 0 and order == list(range(len(flat))):  # already in place, and nothing is copied
            return flat.flatten(0, 1)
        return torch.cat([flat[k] for k in order], dim)


def _read(buffer: torch.Tensor, region: Region) -> torch.Tensor:
    slices, start, stop = region
    return buffer[slices].reshape(-1)[start:stop]


def _write(buffer: torch.Tensor, region: Region, values: torch.Tensor, first: bool) -> None:
    """Put values into a region, or add them where they are not the first."""
    slices, start, stop = region
    # where the region is the whole box, no flat copy of it is made
    view = buffer[slices]
    if start == 0 and stop == view.numel():
        values = values.reshape(view.shape)
        view.copy_(values) if first else _added_to(view, values)
        return
    flat = view.reshape(-1)  # a range of a region; a copy of it where the region is not contiguous
    if first:
        flat[start:stop] = values
    else:
        _added_to(flat[start:stop], values)
    if not view.is_contiguous():
        view.copy_(flat.reshape(view.shape))


def _added_to(view: torch.Tensor, values: torch.Tensor) -> None:
    """Add values in place; unsigned numbers, which torch does not add, as the signed ones of the same bits."""
    signed = _SIGNED.get(view.dtype, view.dtype)
    view.view(signed).add_(values.view(signed))


@functools.lru_cache(maxsize=256)
def _recipes(plan: BoxingPlan, rank: int) -> tuple[_Recipe, ...]:
    recipes = []
    for step in _steps(plan):
        source, target = step.exchange.source, step.exchange.target
        members = _parties(step, plan.ranks)[rank]
        communicates = _communicates(step, plan.ranks)
        # along an axis of one rank, or of a tensor without elements, there is nothing to send, and no group for it
        # torch's own collectives are faster than an exchange where shards are equal
        is_added = step.kind == "all_reduce" and getattr(torch, plan.dtype) in REDUCED
        has_native = is_added or (step.kind == "all_gather" and source.divides)
        native = step.kind if communicates and has_native else None
        target_shape = target.local_shape(rank) if target.placement.contains(rank) else None
        written: set[Piece] = set()
        phases = [] if native else [_phase(step, phase, rank, members, written) for phase in step.phases]
        # pieces do not overlap, so their sizes add up to the shard where nothing is left out
        filled = sum(piece.size for piece in written)
        recipes.append(
            _Recipe(
                step,
                rank,
                members,
                communicates,
                native,
                tuple(phases),
                target_shape,
                target_shape is not None and filled == math.prod(target_shape),
            )
        )
    return tuple(recipes)


@functools.lru_cache(maxsize=256)
def _steps(plan: BoxingPlan) -> tuple[Step, ...]:
    """The steps, with an all-gather along several axes as one all-gather along each of them, inner axis first.

    A rank receives the same bytes, gloo's groups are smaller, and less has to be put into its place.
    """
    steps: list[Step] = []
    for step in plan.steps:
        source, target = step.exchange.source, step.exchange.target
        # pieces of different lengths would need padding on each axis
        if step.kind != "all_gather" or not source.divides:
            steps.append(step)
            continue
        for before, after in axis_by_axis(source, target, reversed(range(source.placement.ndim))):
            gather = named_step(before, after)
            assert gather is not None
            steps.append(gather)
    return tuple(steps)


@functools.lru_cache(maxsize=256)
def _parties(step: Step, ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """rank -> the ranks that its messages stay among in a step, in the order that torch gives a group: sorted."""
    # axes along which the step sends nothing: ranks that differ there are in different groups
    apart = step.exchange.apart
    if not apart:
        return dict.fromkeys(ranks, tuple(sorted(ranks)))
    placement = step.exchange.source.placement
    parties: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(ranks):
        at = placement.coordinates(rank)
        parties.setdefault(tuple(at[axis] for axis in apart), []).append(rank)
    return {rank: tuple(party) for party in parties.values() for rank in party}


def _phase(step: Step, phase: str, rank: int, members: tuple[int, ...], written: set[Piece]) -> _Phase:
    """A phase of a rank.

    Args:
        written: pieces of the result that have a value; those of this phase are put in. Pieces are equal or do not
            overlap, so a piece that is not in it can be written instead of added.
    """
    exchange = step.exchange

    def is_first(part: Message) -> bool:
        new = part.piece not in written
        written.add(part.piece)
        return new

    def region(transfer: Message, owner: int, buffer: str) -> Region:
        piece = transfer.piece
        return local_slices(piece.box, exchange.layout_of(buffer), owner), piece.start, piece.stop

    # what stays on this rank is among these, with itself as sender
    received = list(receives(exchange, rank, phase))
    arriving = [part for part in received if part.sender != rank]
    arriving.sort(key=lambda part: (members.index(part.sender), part.order))
    sent = sorted(sends(exchange, rank, phase), key=lambda part: (members.index(part.receiver), part.order))
    keeps = tuple(  # before `arriving`, as `_exchange` writes them: the first there is written
        (part.origin, region(part, rank, part.origin), region(part, rank, "result"), is_first(part))
        for part in received
        if part.sender == rank
    )
    return _Phase(
        tuple((part.origin, region(part, rank, part.origin)) for part in sent),
        tuple(sum(part.piece.size for part in sent if part.receiver == member) for member in members),
        tuple((region(part, rank, "result"), is_first(part)) for part in arriving),
        tuple(sum(part.piece.size for part in arriving if part.sender == member) for member in members),
        keeps,
    )


@functools.lru_cache(maxsize=1024)
def _communicates(step: Step, ranks: tuple[int, ...]) -> bool:
    """Whether any rank receives something: the same on every rank."""
    return any(step.elements_received(rank) for rank in ranks)


def _make_groups(plan: BoxingPlan) -> None:
    """Make the groups of a plan that are not there yet: torch wants every rank of the world there, in one order."""
    for step in _steps(plan):
        if not _communicates(step, plan.ranks):
            continue
        # every rank makes every group, also those it is not in: torch waits for all
        for members in dict.fromkeys(_parties(step, plan.ranks).values()):
            group(members)
