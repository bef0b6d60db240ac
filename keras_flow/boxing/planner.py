"""The planner: a boxing plan for any two layouts of one logical shape.

Candidates, from the one that engines run fastest: one collective, a chain of collectives, the exchange of slices, which
exists for every pair and reaches the lower bound. `preferred` says which is taken.

    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> def kinds(before, after):
    ...     return [step.kind for step in plan(Layout(mesh, before, (4, 4)), Layout(mesh, after, (4, 4))).steps]
    >>> kinds("P,P", "B,B"), kinds("P,S(0)", "S(1),B"), kinds("S(0),S(0)", "B,S(0)")
    (['all_reduce'], ['reduce_scatter', 'all_gather'], ['exchange'])
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np

from keras_flow.boxing import cost
from keras_flow.boxing.choice import preferred
from keras_flow.boxing.collectives import axis_by_axis, named_step
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.search import cheapest_chain, quickest_chain
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.boxing.step import Step
from keras_flow.boxing.topology import Topology, plan_time, step_time
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, itemsize


def plan(source: Layout, target: Layout, dtype: object = "float32", *, topology: Topology | None = None) -> BoxingPlan:
    """How a tensor gets from `source` to `target`.

    Without a topology the plan receives the fewest bytes that any plan can (`lower_bound`), by collectives where they
    reach that and load no rank more than the exchange does; with one it takes the least modelled time among this
    plan, the chains of collectives along single axes and the quickest chain (`quickest_chain`: within hosts, then
    across).

    Args:
        source, target: layouts of one logical shape; their placements may differ in ranks, order, hierarchy and type.
        dtype: element type, for the bytes.
        topology: latency and bandwidth of the links.

    Raises:
        FlowError: layouts of different shapes, or no such dtype.

    Example:
        >>> from keras_flow.placements import Placement
        >>> mesh = Placement([[0, 1], [2, 3]])
        >>> planned = plan(Layout(mesh, "P,P", (8, 8)), Layout(mesh, "B,B", (8, 8)))
        >>> [step.kind for step in planned.steps], planned.total_bytes
        (['all_reduce'], 1536)
    """
    if source.shape != target.shape:
        raise FlowError(
            f"boxing changes the layout of one logical tensor: the source has shape {list(source.shape)}, the target "
            f"{list(target.shape)}. Reshape first, or give layouts of one shape"
        )
    itemsize(dtype)
    name = str(dtype) if isinstance(dtype, str) else np.dtype(dtype).name  # type: ignore[arg-type]
    fewest = _of_fewest_bytes(source, target, name, (source.placement.axis_names, target.placement.axis_names))
    if topology is None:
        return fewest
    candidates = [fewest, *(BoxingPlan(source, target, name, steps) for steps in _chains_by_axis(source, target))]
    if Exchange(source, target).same_placement:
        limit = min(plan_time(candidate, topology) for candidate in candidates)
        chain = quickest_chain(source, target, lambda step: step_time(step, itemsize(dtype), topology), limit)
        candidates += [BoxingPlan(source, target, name, chain)] if chain else []
    best = preferred(candidates, topology)
    note = "time on the given topology"
    more = best.total_bytes - min(candidate.total_bytes for candidate in candidates)
    if more:
        faster = plan_time(fewest, topology) / plan_time(best, topology)
        note += f"; {more} bytes more than the fewest, {faster:.2f}x faster"
    return replace(best, chosen=note)


@functools.lru_cache(maxsize=1024)  # a training loop plans each change once
def _of_fewest_bytes(source: Layout, target: Layout, dtype: str, names: object) -> BoxingPlan:
    """The plan that receives the fewest bytes. Candidates that cannot be the preferred one are not made.

    `names` are those of axes, by which equal placements may differ: a plan is kept for each.
    """
    if not Exchange(source, target).same_placement:
        return _of_slices(source, target, dtype)
    # axis names and the device type may still differ; ranks keep their shards
    if source.nd_sbp == target.nd_sbp:
        return BoxingPlan(source, target, dtype, ())
    step = named_step(source, target)
    # groups that work apart may have to receive more than all ranks together would
    if step is not None and step.total <= cost.total(Exchange(source, target)):
        return BoxingPlan(source, target, dtype, (step,))
    steps = cheapest_chain(source, target)
    if steps is None:
        return _of_slices(source, target, dtype)
    chain = BoxingPlan(source, target, dtype, steps)
    if all(step.kind != "permute" for step in steps):
        return chain  # all ranks receive the same, so no plan of as few bytes loads its most loaded rank less
    return preferred((chain, _of_slices(source, target, dtype)))


def _of_slices(source: Layout, target: Layout, dtype: str) -> BoxingPlan:
    """The exchange of slices, which receives the fewest bytes."""
    return BoxingPlan(source, target, dtype, (Step.of("exchange", Exchange(source, target)),))


def _chains_by_axis(source: Layout, target: Layout) -> list[tuple[Step, ...]]:
    """Chains of steps that change one axis at a time, in every order of the axes, for one placement.

    They may receive more bytes than needed, but along links that are quicker.
    """
    if not Exchange(source, target).same_placement:
        return []
    changed = [axis for axis, (a, b) in enumerate(zip(source.nd_sbp, target.nd_sbp, strict=True)) if a != b]
    if len(changed) < 2:
        return []
    return [
        tuple(
            named_step(before, after) or Step.of("exchange", Exchange(before, after))
            for before, after in axis_by_axis(source, target, order)
        )
        # along a slow link it is best to send first what is still small, or last what is small again
        for order in itertools.permutations(changed)
    ]
