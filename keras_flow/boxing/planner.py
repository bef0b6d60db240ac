"""The planner: a boxing plan for any two layouts of one logical shape."""

from __future__ import annotations

import math

from keras_flow.boxing.cells import Cells
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.shares import balanced_exchange
from keras_flow.boxing.spec import BoxingPlan, Step
from keras_flow.boxing.topology import Topology, plan_time
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, itemsize
from keras_flow.sbp import Broadcast, PartialSum, Sbp, Split

#: ranks up to which two ways are compared by counting their bytes; above it by the formula for one element
COUNTED = 64


def plan(source: Layout, target: Layout, dtype: object = "float32", *, topology: Topology | None = None) -> BoxingPlan:
    """How a tensor gets from `source` to `target`.

    Without a topology the plan receives the fewest bytes that any plan can (`lower_bound`), then has the fewest
    steps; with one it takes the least modelled time among this plan and the chains of collectives along single axes.

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
    one, other = source.placement, target.placement
    same = one.ranks == other.ranks and one.hierarchy == other.hierarchy
    if same and source.nd_sbp == target.nd_sbp:
        return BoxingPlan(source, target, dtype, ())
    if same:
        found = _collective(source, target)
        if found is not None:
            return BoxingPlan(source, target, dtype, (found,))
    plain = Exchange(source, target)
    balanced = balanced_exchange(plain)
    made = BoxingPlan(source, target, dtype, (Step("exchange", balanced.phases, balanced),))
    if balanced.table and any(made.peak_bytes(rank) > made.memory_limit(rank) for rank in made.ranks):
        # small uneven shards: what the mergers hold would go over the limit of memory
        return BoxingPlan(source, target, dtype, (Step("exchange", plain.phases, plain),))
    return made


def _collective(source: Layout, target: Layout) -> Step | None:
    """The single step in groups of the changed axes, where there is one and it receives no more than the exchange."""
    pairs = list(zip(source.nd_sbp, target.nd_sbp, strict=True))
    apart = tuple(axis for axis, (before, after) in enumerate(pairs) if before == after)
    exchange = Exchange(source, target, apart)
    kind = _kind(exchange, [pair for axis, pair in enumerate(pairs) if axis not in apart])
    if kind is None or not _as_few_bytes(exchange):
        return None
    return Step(kind, exchange.phases, exchange)


def _kind(exchange: Exchange, changes: list[tuple[Sbp, Sbp]]) -> str | None:
    source, target = exchange.of_source, exchange.of_target
    dims = list(zip(source.axes_of_dim, target.axes_of_dim, strict=True))
    cut = all(before == after[: len(before)] for before, after in dims)  # the target splits further
    joined = all(after == before[: len(after)] for before, after in dims)  # the target splits less
    befores, afters = [before for before, _ in changes], [after for _, after in changes]
    if cut and all(isinstance(before, Broadcast) for before in befores):
        return "local_keep" if any(isinstance(after, PartialSum) for after in afters) else "local_slice"
    if joined and all(isinstance(after, PartialSum) for after in afters):
        return "local_keep"
    if joined and all(isinstance(before, Split) and isinstance(after, Broadcast) for before, after in changes):
        return "all_gather"
    if all(isinstance(before, PartialSum) for before in befores):
        if all(isinstance(after, Broadcast) for after in afters):
            return "all_reduce"
        if cut and all(isinstance(after, Split) for after in afters):
            return "reduce_scatter"
    if all(isinstance(before, Split) and isinstance(after, Split) for before, after in changes):
        if _same_grid(source, target):
            return "permute"
        if len(changes) == 1 and _innermost(source, target, exchange.apart):
            return "all_to_all"
    return None


def _same_grid(source: Cells, target: Cells) -> bool:
    """Whether both cut the tensor into the same cells, so that whole shards change hands."""
    shape = source.layout.shape
    parts = [
        tuple(math.prod(cells.sizes[axis] for axis in axes) for axes in cells.axes_of_dim) for cells in (source, target)
    ]
    return parts[0] == parts[1] and all(length % n == 0 for length, n in zip(shape, parts[0], strict=True))


def _innermost(source: Cells, target: Cells, apart: tuple[int, ...]) -> bool:
    """Whether the one changed axis is the innermost of its dim on both sides, the others being in the same order."""
    for before, after in zip(source.axes_of_dim, target.axes_of_dim, strict=True):
        kept = tuple(axis for axis in before if axis in apart)
        if before[: len(kept)] != kept or after[: len(kept)] != kept:
            return False
    return True


def _as_few_bytes(exchange: Exchange) -> bool:
    """Whether groups that work apart receive as little as all ranks together could.

    Per element, with p summands and m destinations (families), p - 1 + m - 1 receipts are needed. Groups of their
    own need them once for each coordinate on the unchanged P and B axes.
    """
    if exchange.of_source.classes == 1:
        return True
    unchanged_p = math.prod(
        exchange.of_source.sizes[axis] for axis in exchange.of_source.class_axes if axis in exchange.apart
    )
    unchanged_b = math.prod(
        exchange.of_target.sizes[axis] for axis in exchange.of_target.copy_axes if axis in exchange.apart
    )
    summed, families = exchange.summed, exchange.families
    if unchanged_p * unchanged_b == 1:
        return True
    ranks = exchange.source.placement.ranks
    if exchange.of_target.class_axes and len(ranks) <= COUNTED:
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

    one, other = source.placement, target.placement
    if one.ranks != other.ranks or one.hierarchy != other.hierarchy:
        return []
    changed = [axis for axis, (a, b) in enumerate(zip(source.nd_sbp, target.nd_sbp, strict=True)) if a != b]
    if len(changed) < 2:
        return []
    chains = []
    for order in itertools.permutations(changed):
        steps: list[Step] = []
        at = list(source.nd_sbp)
        for axis in order:
            before = Layout(one, tuple(at), source.shape)
            at[axis] = target.nd_sbp[axis]
            after = Layout(one, tuple(at), source.shape)
            steps.append(_alone(before, after, axis))
        chains.append(tuple(steps))
    return chains


def _alone(source: Layout, target: Layout, axis: int) -> Step:
    """The step that changes one axis, in groups along it where it is one of the named kinds."""
    apart = tuple(other for other in range(source.placement.ndim) if other != axis)
    exchange = Exchange(source, target, apart)
    kind = _kind(exchange, [(source.nd_sbp[axis], target.nd_sbp[axis])])
    if kind is None:
        exchange = Exchange(source, target)
    return Step(kind or "exchange", exchange.phases, exchange)
