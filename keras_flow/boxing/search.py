"""Chains of named steps, which every engine runs as its own collectives, between two layouts on one placement.

A chain is taken instead of an exchange of slices where it receives as few bytes as any plan can and loads no rank more.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from keras_flow.boxing.blocks import Blocks
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.lower_bound import lower_bound
from keras_flow.boxing.spec import BoxingPlan, Step
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Broadcast, NdSbp, PartialSum, Sbp, Split, broadcast, partial_sum, split

#: ranks up to which atoms are counted; above it the bound is taken from closed forms where there is one
COUNTED = 64
#: placement axes up to which chains are searched for
SEARCHED_AXES = 3


def named_step(source: Layout, target: Layout) -> Step | None:
    """The named step in groups of the changed axes that leads from one layout to the other, where there is one."""
    kind = _kind(Blocks(source), Blocks(target))
    if kind is None:
        return None
    return Step.of(kind, Exchange(source, target, _unchanged(source, target)))


def fits_kind(step: Step) -> bool:
    """Whether a step does what its kind says."""
    exchange = step.exchange
    if step.kind == "exchange":
        return True
    if exchange.same_placement:
        return step == named_step(exchange.source, exchange.target)
    ends = exchange.source, exchange.target  # a permute may lead to the same ranks with their axes in another order
    same_ranks = len({tuple(sorted(end.placement.ranks)) for end in ends}) == 1
    return (
        step.kind == "permute"
        and same_ranks
        and all(map(_is_permutable, ends))
        and _same_grid(exchange.of_source, exchange.of_target)
    )


def axis_by_axis(source: Layout, target: Layout, order: Iterable[int]) -> list[tuple[Layout, Layout]]:
    """The layouts before and after each change of one axis, in this order; axes that do not change are left out."""
    stations, at = [source], list(source.nd_sbp)
    for axis in order:
        if at[axis] != target.nd_sbp[axis]:
            at[axis] = target.nd_sbp[axis]
            stations.append(Layout(source.placement, tuple(at), source.shape))
    return list(itertools.pairwise(stations))


def chain(source: Layout, target: Layout) -> tuple[Step, ...] | None:
    """The chain of named steps that receives as few bytes as any plan can; None where no chain does.

    Layouts on the way divide evenly and have shards no larger than the larger of source and target. Of several such
    chains the one whose most loaded rank receives least, then the shortest.
    """
    if source.placement.ndim > SEARCHED_AXES or not (source.divides and target.divides) or 0 in source.shape:
        return None
    least = _least(source, target)
    if least is None:
        return None
    largest = max(_local(source), _local(target))
    options = _options(source, target)
    best = {source.nd_sbp: (0, 0, 0)}
    came: dict[NdSbp, NdSbp] = {}
    queue = [(best[source.nd_sbp], 0, source.nd_sbp)]
    numbers = itertools.count(1)
    while queue:
        cost, _, at = heapq.heappop(queue)
        if at == target.nd_sbp:
            break
        if cost > best[at]:
            continue
        for after, total, load, held in _edges(source.placement, source.shape, options, at):
            new = (cost[0] + total, cost[1] + load, cost[2] + 1)
            if new[0] <= least and held <= largest and (after not in best or new < best[after]):
                best[after], came[after] = new, at
                heapq.heappush(queue, (new, next(numbers), after))
    if target.nd_sbp not in came:
        return None
    path = [target.nd_sbp]
    while path[-1] != source.nd_sbp:
        path.append(came[path[-1]])
    layouts = [Layout(source.placement, nd_sbp, source.shape) for nd_sbp in reversed(path)]
    steps = [named_step(before, after) for before, after in itertools.pairwise(layouts)]
    return tuple(step for step in steps if step is not None)


def by_collectives(plan: BoxingPlan) -> BoxingPlan:
    """The plan by named steps, where they receive as many bytes in total; it may load its most loaded rank more.

    For engines whose own collectives are faster than an exchange of slices. A step may lie on the plan's placement with
    its axes in another order, where an outer split has become an inner one, or with axes of prime sizes (`refined`):
    what such steps join is for executors, not for the JSON form. Where no named steps do, but do around an exchange
    along two axes, that is taken; else an exchange whose shares are balanced over the ranks gives way to that of equal
    ranges, which has fewer messages.
    """
    plain = Exchange(plan.source, plan.target)
    if not plain.same_placement or all(step.kind != "exchange" for step in plan.steps):
        return plan
    named = [steps for steps in (chain(plan.source, plan.target), *_turned_chains(plan)) if steps is not None]
    found = _as_few(plan, named) or _as_few(plan, _around_exchanges(plan))
    if found:
        return min(found, key=lambda one: (one.most_loaded, len(one.steps)))
    of_slices = replace(plan, steps=(Step.of("exchange", plain),))
    return of_slices if of_slices.total_bytes <= plan.total_bytes else plan


def _as_few(plan: BoxingPlan, ways: Iterable[tuple[Step, ...]]) -> list[BoxingPlan]:
    """The plan by other steps, of those that receive no more."""
    made = [replace(plan, steps=steps) for steps in ways]
    return [one for one in made if one.total_bytes <= plan.total_bytes]


def _turned_chains(plan: BoxingPlan) -> Iterator[tuple[Step, ...]]:
    """Chains with the axes in another order, in which one end lies as it is; at the other a permute leads to it."""
    source, target = plan.source, plan.target
    for order in itertools.permutations(range(source.placement.ndim)):
        before, after = _turned(source, order), _turned(target, order)
        source_lies, target_lies = _lies_alike(source, order), _lies_alike(target, order)
        if source_lies == target_lies or not _is_permutable(target if source_lies else source):
            continue
        steps = chain(before, after)
        if steps is not None and source_lies:
            yield *steps, Step.of("permute", Exchange(after, target))
        elif steps is not None:
            yield Step.of("permute", Exchange(source, before)), *steps


def refined(placement: Placement) -> Placement:
    """The same ranks in the same order, on axes of prime sizes: an axis of 4 is two of 2, the first of them outside."""
    sizes = [size for axis in placement.hierarchy for size in _primes(axis)]
    if len(sizes) == placement.ndim:
        return placement
    return Placement(np.reshape(placement.ranks, sizes), type=placement.type)


def _primes(size: int) -> list[int]:
    found, factor = [], 2
    while factor * factor <= size:
        if size % factor == 0:
            found.append(factor)
            size //= factor
        else:
            factor += 1
    return [*found, size]


def _around_exchanges(plan: BoxingPlan) -> Iterator[tuple[Step, ...]]:
    """Exchanges along two axes of the refined placement, with named steps along the others before and after.

    For targets that several ranks hold: else an exchange is one collective or two anyway.
    """
    placement = refined(plan.source.placement)
    if not 2 < placement.ndim <= SEARCHED_AXES or not Blocks(plan.target).copy_axes:
        return
    if not (plan.source.divides and plan.target.divides) or 0 in plan.source.shape:
        return
    source, target = (_on(layout, placement) for layout in (plan.source, plan.target))
    largest = max(_local(source), _local(target))
    for pair in itertools.combinations(range(placement.ndim), 2):
        for others in itertools.product(_parts(source, target), repeat=placement.ndim - 2):
            before, after = (_with(end, pair, others) for end in (source, target))
            if not (before.divides and after.divides) or max(_local(before), _local(after)) > largest:
                continue
            first, last = named_step(source, before), named_step(after, target)
            if first is not None and last is not None:
                middle = named_step(before, after)
                if middle is None:
                    middle = Step.of("exchange", Exchange(before, after, _unchanged(before, after)))
                steps = (first, middle, last)
                yield tuple(step for step in steps if step.exchange.source != step.exchange.target)


def _with(layout: Layout, pair: tuple[int, int], others: tuple[Sbp, ...]) -> Layout:
    """The layout with other parts on all axes but two."""
    of_others = iter(others)
    nd_sbp = [part if axis in pair else next(of_others) for axis, part in enumerate(layout.nd_sbp)]
    return Layout(layout.placement, nd_sbp, layout.shape)


def _on(layout: Layout, placement: Placement) -> Layout:
    """The layout on the refined placement."""
    parts = zip(layout.nd_sbp, layout.placement.hierarchy, strict=True)
    return Layout(placement, [part for part, size in parts for _ in _primes(size)], layout.shape)


def _turned(layout: Layout, order: tuple[int, ...]) -> Layout:
    """The same parts with the axes of the placement in another order."""
    placement = layout.placement
    ranks = np.reshape(placement.ranks, placement.hierarchy).transpose(order)
    names = tuple(placement.axis_names[axis] for axis in order)
    nd_sbp = tuple(layout.nd_sbp[axis] for axis in order)
    return Layout(Placement(ranks, names, placement.type), nd_sbp, layout.shape)


def _lies_alike(layout: Layout, order: tuple[int, ...]) -> bool:
    """Whether every rank holds the same with the axes in this order."""
    return all(list(axes) == [axis for axis in order if axis in axes] for axes in Blocks(layout).axes_of_dim)


def _is_permutable(layout: Layout) -> bool:
    """Whether each shard has one holder, and all are of one size."""
    return layout.divides and len(Blocks(layout).split_axes) == layout.placement.ndim


def is_uniform(steps: tuple[Step, ...]) -> bool:
    """Whether all ranks receive the same, so that no plan of as few bytes loads its most loaded rank less."""
    return all(step.kind != "permute" for step in steps)


def _options(source: Layout, target: Layout) -> tuple[NdSbp, ...]:
    """The layouts that a chain may pass through."""
    return tuple(
        nd_sbp
        for nd_sbp in itertools.product(_parts(source, target), repeat=source.placement.ndim)
        if Layout(source.placement, nd_sbp, source.shape).divides
    )


def _parts(source: Layout, target: Layout) -> list[Sbp]:
    """What a chain may put on an axis: any split of either end, B, and P where either has one.

    Where neither end has a split, sums are made in blocks of the first dim that all axes together can split.
    """
    parts = dict.fromkeys((*source.nd_sbp, *target.nd_sbp))
    splits = [part for part in parts if isinstance(part, Split)]
    has_partial = source.has_partial or target.has_partial
    if has_partial and not splits:
        splits = [split(dim) for dim, n in enumerate(source.shape) if n % source.placement.size == 0][:1]
    splits.sort(key=lambda part: part.dim)
    return [*splits, broadcast, *([partial_sum] if has_partial else [])]


@functools.lru_cache(maxsize=4096)
def _edges(
    placement, shape: tuple[int, ...], options: tuple[NdSbp, ...], at: NdSbp
) -> tuple[tuple[NdSbp, int, int, int], ...]:
    """The layouts one named step away: elements received by all ranks, by the most loaded one, and those it holds."""
    source = Layout(placement, at, shape)
    found = []
    for nd_sbp in options:
        target = Layout(placement, nd_sbp, shape)
        kind = _kind(Blocks(source), Blocks(target)) if nd_sbp != at else None
        received = _received(kind, source, target) if kind else None
        if received is not None:
            found.append((nd_sbp, *received, _local(target)))
    return tuple(found)


def _received(kind: str, source: Layout, target: Layout) -> tuple[int, int] | None:
    """Elements that a named step receives: of all ranks, and of the most loaded one."""
    ranks = source.placement.size
    apart = _unchanged(source, target)
    group = math.prod(size for axis, size in enumerate(source.placement.hierarchy) if axis not in apart)
    if kind in ("local_slice", "local_keep"):
        each = 0
    elif kind == "all_gather":
        each = (group - 1) * _local(source)
    elif kind == "reduce_scatter":
        each = (group - 1) * _local(target)
    elif kind == "all_to_all":
        each = _local(source) // group * (group - 1)
    elif kind == "all_reduce":
        local = _local(source)
        if local % group:
            return None  # ranges of two sizes
        each = 2 * (group - 1) * local // group
    else:
        if ranks > COUNTED:
            return None
        one, other = Blocks(source), Blocks(target)
        moved = sum(one.box_at(at) != other.box_at(at) for at in one.spread(tuple(range(len(one.sizes)))))
        return moved * _local(source), _local(source)
    return ranks * each, each


def _least(source: Layout, target: Layout) -> int | None:
    """Elements that any plan receives; None where there is no closed form and there are too many ranks to count."""
    ranks = source.placement.size
    if ranks <= COUNTED:
        return lower_bound(source, target, "int8")
    if target.has_partial:
        return None
    one, other = Blocks(source), Blocks(target)
    if source.has_partial:  # as if a destination held a summand of every element: never more than the bound
        return math.prod(source.shape) * (one.classes + other.copies - 2)
    common = np.ones((ranks,), np.int64)
    for dim in range(len(source.shape)):
        (start, stop), (first, last) = (_bounds(layout, dim) for layout in (source, target))
        common *= np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
    return ranks * _local(target) - int(common.sum())


def _bounds(layout: Layout, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """[ranks], [ranks]: where the block of each rank starts and stops along a dim; the layout divides."""
    at = np.indices(layout.placement.hierarchy).reshape(layout.placement.ndim, -1)
    block, parts = np.zeros(at.shape[1], np.int64), 1
    for axis in Blocks(layout).axes_of_dim[dim]:
        block, parts = block * layout.placement.hierarchy[axis] + at[axis], parts * layout.placement.hierarchy[axis]
    length = layout.shape[dim] // parts
    return block * length, (block + 1) * length


def _local(layout: Layout) -> int:
    """Elements of a shard of a layout that divides."""
    return math.prod(n // layout.parts_of_dim(dim) for dim, n in enumerate(layout.shape))


def _unchanged(source: Layout, target: Layout) -> tuple[int, ...]:
    pairs = zip(source.nd_sbp, target.nd_sbp, strict=True)
    return tuple(axis for axis, (before, after) in enumerate(pairs) if before == after)


def _kind(source: Blocks, target: Blocks) -> str | None:
    """The name of the step between two layouts on one placement."""
    pairs = list(zip(source.layout.nd_sbp, target.layout.nd_sbp, strict=True))
    changes = [(before, after) for before, after in pairs if before != after]
    befores, afters = [before for before, _ in changes], [after for _, after in changes]
    dims = list(zip(source.axes_of_dim, target.axes_of_dim, strict=True))
    cut = all(before == after[: len(before)] for before, after in dims)  # the target splits further
    joined = all(after == before[: len(after)] for before, after in dims)  # the target splits less
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
        if len(changes) == 1 and _innermost(pairs, dims):
            return "all_to_all"
    return None


def _same_grid(source: Blocks, target: Blocks) -> bool:
    """Whether both cut the tensor into the same cells, so that whole shards change hands."""
    parts = [
        tuple(math.prod(cells.sizes[axis] for axis in axes) for axes in cells.axes_of_dim) for cells in (source, target)
    ]
    shape = source.layout.shape
    return parts[0] == parts[1] and all(length % n == 0 for length, n in zip(shape, parts[0], strict=True))


def _innermost(pairs: list[tuple], dims: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether the one changed axis is the innermost of its dim on both sides, the others being in the same order."""
    for before, after in dims:
        kept = tuple(axis for axis in before if pairs[axis][0] == pairs[axis][1])
        if before[: len(kept)] != kept or after[: len(kept)] != kept:
            return False
    return True
