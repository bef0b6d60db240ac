"""A plan in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from keras_flow import sbp as _sbp
from keras_flow.boxing.collectives import KINDS
from keras_flow.boxing.lower_bound import lower_bound
from keras_flow.boxing.lowering import lower
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout
from keras_flow.units import amount

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan

#: ranks up to which each is asked what it receives and needs; of more only a sample is
ASKED = 512
#: size of that sample
SAMPLE = 16
#: how many ranks, runs of ranks or amounts are written out
WRITTEN = 8


def describe(plan: BoxingPlan) -> str:
    """Steps, groups, bytes received, lower bound and peak memory."""
    lines = [_layout(plan.source), f"-> {_layout(plan.target)}, {plan.dtype}"]
    if not plan.steps:
        return "\n".join([*lines, "nothing to do: the layouts are the same"])
    for number, step in enumerate(plan.steps, 1):
        lines += [f"{number}. {step}", f"   {KINDS[step.kind].does}", f"   groups: {_groups(step)}"]
    lines += _on_jax(plan)
    # ranks of a large plan are alike but for their blocks, so some of them tell the peak
    asked = plan.ranks if len(plan.ranks) <= ASKED else plan.ranks[:: len(plan.ranks) // SAMPLE]
    of_asked = "" if asked == plan.ranks else f" of {len(asked)} that were looked at"
    if of_asked and any(step.closed_loads is None for step in plan.steps):
        loads, of_loads = {rank: plan.bytes_received(rank) for rank in asked}, of_asked
    else:
        loads, of_loads = plan.loads, ""
    bound = lower_bound(plan.source, plan.target, plan.dtype)
    ratio = "at the lower bound" if plan.total_bytes == bound else f"{plan.total_bytes / bound:.4g}x the lower bound"
    total, most = amount(plan.total_bytes), amount(max(loads.values()))
    lines.append(f"received: {total} by all ranks together ({ratio}), at most {most} by one{of_loads}")
    lines += [f"   {line}" for line in _by_amount(loads)]
    lines.append(f"lower bound: {bound:,} bytes")
    lines.append(f"peak memory: {amount(max(plan.peak_bytes(rank) for rank in asked))} on one rank{of_asked}")
    lines.append(f"chosen for: {plan.chosen}")
    return "\n".join(lines)


def _on_jax(plan: BoxingPlan) -> list[str]:
    """Say what JAX runs in the place of an exchange: XLA's collectives, where they receive no more bytes."""
    if all(step.kind != "exchange" for step in plan.steps):
        return []
    if len(plan.ranks) > ASKED:
        return ["on JAX: XLA's collectives where they receive no more bytes (not looked up for so many ranks)"]
    lowered = lower(plan)
    if lowered.steps == plan.steps:
        return []
    load = f" (as many bytes, at most {amount(lowered.most_loaded)} by one rank)"
    return [f"on JAX: {', then '.join(map(_in_its_axes, lowered.steps))}{load}"]


def _in_its_axes(step: Step) -> str:
    """A step; one that only leads to another order of the axes says which."""
    before, after = step.exchange.source.placement, step.exchange.target.placement
    return str(step) if before == after else f"{step.kind} to the order of axes {', '.join(after.axis_names)}"


def _layout(layout: Layout) -> str:
    if layout.placement.size <= ASKED:
        return str(layout)
    hierarchy = " x ".join(map(str, layout.placement.hierarchy))
    return f"Layout({_sbp.text(layout.nd_sbp)} of {list(layout.shape)} on {hierarchy} ranks)"


def _groups(step: Step) -> str:
    """`"4 of 2 ranks along axis0, the first [0, 4]"`."""
    exchange = step.exchange
    blocks, placement = exchange.source_blocks, exchange.source.placement
    if not exchange.apart:
        return f"one of all {len({*placement.ranks, *exchange.target.placement.ranks})} ranks"
    number = math.prod(placement.hierarchy[axis] for axis in exchange.apart)
    inside = blocks.all_coords(tuple(range(placement.ndim)), dict.fromkeys(exchange.apart, 0))
    first = ", ".join(str(blocks.rank_at(coords)) for coords in itertools.islice(inside, WRITTEN))
    size = placement.size // number
    return f"{number} of {size} ranks along {', '.join(step.axes)}, the first [{first}{', ...' * (size > WRITTEN)}]"


def _by_amount(loads: Mapping[int, int]) -> list[str]:
    """`"ranks 0-7: 25,165,824 bytes each"`, a line for each amount, the largest first."""
    of_amount: dict[int, list[int]] = {}
    for rank, bytes_ in loads.items():
        of_amount.setdefault(bytes_, []).append(rank)
    amounts = sorted(of_amount, reverse=True)
    lines = [
        f"{_runs(of_amount[bytes_])}: {bytes_:,} bytes{' each' * (len(of_amount[bytes_]) > 1)}"
        for bytes_ in amounts[:WRITTEN]
    ]
    more = amounts[WRITTEN:]
    if more:
        ranks = sum(len(of_amount[bytes_]) for bytes_ in more)
        lines.append(f"{ranks} more ranks: {more[-1]:,} to {more[0]:,} bytes")
    return lines


def _runs(ranks: Sequence[int]) -> str:
    """`"ranks 0-3, 8"`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    if len(runs) > WRITTEN:
        return f"{len(ranks)} ranks, {', '.join(str(rank) for rank in sorted(ranks)[:WRITTEN])}, ..."
    return "ranks " + ", ".join("-".join(map(str, run)) for run in runs)
