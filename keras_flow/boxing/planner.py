"""The planner: a boxing plan for any two layouts of one logical shape."""

from __future__ import annotations

import math
from dataclasses import replace

from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.load_balance import balanced_exchange
from keras_flow.boxing.search import COUNTED, axis_by_axis, chain, is_uniform, named_step
from keras_flow.boxing.spec import BoxingPlan, Step
from keras_flow.boxing.topology import Topology, plan_time
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, itemsize


def plan(source: Layout, target: Layout, dtype: object = "float32", *, topology: Topology | None = None) -> BoxingPlan:
    """How a tensor gets from `source` to `target`.

    Without a topology the plan receives the fewest bytes that any plan can (`lower_bound`), its most loaded rank the
    least among such plans, by collectives where they reach that; with one it takes the least modelled time among this
    plan and the chains of collectives along single axes.

    Args:
        source, target: layouts of one logical shape; their placements may differ in ranks, order, hierarchy and type.
        dtype: element type, for the bytes.
        topology: latency and bandwidth of the links.

    Raises:
        FlowError: layouts of different shapes, or no such dtype.

    Example:
        >>> from keras_flow.placements import Placement
        >>> mesh = Placement([[0, 1], [2, 3]])
        >>> made = plan(Layout(mesh, "P,P", (8, 8)), Layout(mesh, "B,B", (8, 8)))
        >>> [step.kind for step in made.steps], made.total_bytes
        (['all_reduce'], 1536)
    """
    if source.shape != target.shape:
        raise FlowError(
            f"boxing changes the layout of one logical tensor: the source has shape {list(source.shape)}, the target "
            f"{list(target.shape)}. Reshape first, or give layouts of one shape"
        )
    itemsize(dtype)
    name = str(dtype) if isinstance(dtype, str) else _name(dtype)
    direct = _direct(source, target, name)
    if topology is None:
        return direct
    candidates = [direct, *(BoxingPlan(source, target, name, steps) for steps in _chains(source, target))]
    if len(candidates) == 1:
        return replace(direct, chosen="time on the given topology")
    times = [(plan_time(one, topology), one.total_bytes, len(one.steps)) for one in candidates]
    best = min(range(len(candidates)), key=times.__getitem__)
    least = min(bytes_ for _, bytes_, _ in times)
    note = "time on the given topology"
    if times[best][1] > least:
        note += f"; {times[best][1] - least} bytes more than the fewest, {times[0][0] / times[best][0]:.2f}x faster"
    return BoxingPlan(source, target, name, candidates[best].steps, chosen=note)


def _name(dtype: object) -> str:
    import numpy as np

    return np.dtype(dtype).name  # type: ignore[arg-type]


def _direct(source: Layout, target: Layout, dtype: str) -> BoxingPlan:
    """The plan that receives the fewest bytes."""
    same = Exchange(source, target).same_placement
    if same and source.nd_sbp == target.nd_sbp:
        return BoxingPlan(source, target, dtype, ())
    if same:
        found = _collective(source, target)
        if found is not None:
            return BoxingPlan(source, target, dtype, (found,))
    steps = chain(source, target) if same else None
    if steps is None:
        return _of_slices(source, target, dtype)
    of_collectives = BoxingPlan(source, target, dtype, steps)
    if is_uniform(steps):
        return of_collectives
    of_slices = _of_slices(source, target, dtype)
    return of_collectives if of_collectives.most_loaded <= of_slices.most_loaded else of_slices


def _of_slices(source: Layout, target: Layout, dtype: str) -> BoxingPlan:
    """The exchange of slices that receives the fewest bytes."""
    plain = Exchange(source, target)
    balanced = balanced_exchange(plain)
    made = BoxingPlan(source, target, dtype, (Step.of("exchange", balanced),))
    if balanced.table and any(made.peak_bytes(rank) > made.memory_limit(rank) for rank in made.ranks):
        # small uneven shards: what the mergers hold would go over the limit of memory
        return BoxingPlan(source, target, dtype, (Step.of("exchange", plain),))
    return made


def _collective(source: Layout, target: Layout) -> Step | None:
    """The single named step, where there is one and it receives no more than the exchange."""
    found = named_step(source, target)
    return found if found is not None and _as_few_bytes(found.exchange) else None


def _as_few_bytes(exchange: Exchange) -> bool:
    """Whether groups that work apart receive as little as all ranks together could.

    Per element, with p summands and m destinations (families), p - 1 + m - 1 receipts are needed. Groups of their
    own need them once for each coordinate on the unchanged P and B axes.
    """
    if exchange.of_source.classes == 1:
        return True
    unchanged_p = math.prod(
        exchange.of_source.sizes[axis] for axis in exchange.of_source.partial_axes if axis in exchange.apart
    )
    unchanged_b = math.prod(
        exchange.of_target.sizes[axis] for axis in exchange.of_target.copy_axes if axis in exchange.apart
    )
    summed, families = exchange.summed, exchange.families
    if unchanged_p * unchanged_b == 1:
        return True
    ranks = exchange.source.placement.ranks
    if exchange.of_target.partial_axes and len(ranks) <= COUNTED:
        together = Exchange(exchange.source, exchange.target)
        apart, all_ = (
            sum(one.elements_received(rank, phase) for rank in ranks for phase in one.phases)
            for one in (exchange, together)
        )
        return apart <= all_
    apart = unchanged_p * unchanged_b * (summed + families - 2)
    return apart <= summed * unchanged_p + families * unchanged_b - 2


def _chains(source: Layout, target: Layout) -> list[tuple[Step, ...]]:
    """Chains of steps that change one axis at a time, in every order of the axes, for one placement."""
    import itertools

    if not Exchange(source, target).same_placement:
        return []
    changed = [axis for axis, (a, b) in enumerate(zip(source.nd_sbp, target.nd_sbp, strict=True)) if a != b]
    if len(changed) < 2:
        return []
    return [
        tuple(_alone(before, after) for before, after in axis_by_axis(source, target, order))
        for order in itertools.permutations(changed)
    ]


def _alone(source: Layout, target: Layout) -> Step:
    """The step that changes one axis, in groups along it where it is one of the named kinds."""
    found = named_step(source, target)
    if found is not None:
        return found
    return Step.of("exchange", Exchange(source, target))
