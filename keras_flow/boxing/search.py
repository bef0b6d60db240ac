"""Search: the chain of collectives between two layouts on one placement that receives the fewest bytes.

A graph's nodes are the layouts of the placement; an edge is a named step and costs the elements that it receives.
Dijkstra's algorithm (Numerische Mathematik 1, 1959) finds the cheapest chain. It never goes beyond the lower bound of
all plans, so few layouts are looked at, and a chain that it finds receives as little as any plan can.

Example: `P,S(0) -> S(1),B` on 2x2. The rows of a block are summed and scattered along columns, then gathered.

    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> chain = cheapest_chain(Layout(mesh, "P,S(0)", (4, 4)), Layout(mesh, "S(1),B", (4, 4)))
    >>> for step in chain:
    ...     print(step)
    reduce_scatter in groups along axis0: P,S(0) -> S(1),S(0)
    all_gather in groups along axis1: S(1),S(0) -> S(1),B

Limits: placements of up to 3 axes (the layouts are a power of their number), layouts that divide evenly, and on the way
none with a shard larger than the larger end's, which keeps peak memory within its limit. A split of an intermediate
layout is one that either end has.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from keras_flow.boxing import cost
from keras_flow.boxing.collectives import kind_of, named_step, unchanged_axes
from keras_flow.boxing.cost import shard_size
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, Sbp, Split, broadcast, partial_sum, split

#: placement axes up to which chains are searched for
SEARCHED_AXES = 3

#: what a way costs: bytes and steps, or seconds
C = TypeVar("C", float, tuple[int, int, int])


def cheapest_chain(source: Layout, target: Layout) -> tuple[Step, ...] | None:
    """The chain of named steps that receives as few bytes as any plan can; None where no chain does.

    Of several such chains the one with the least sum of its steps' largest loads, then the shortest.
    """
    if source.placement.ndim > SEARCHED_AXES or not (source.divides and target.divides) or 0 in source.shape:
        return None
    # partial costs above the bound are cut off, so a search that finds nothing also ends early
    bound = cost.total(Exchange(source, target))
    largest = max(shard_size(source), shard_size(target))
    options = _layouts_on_the_way(source, target)

    # cost of a way: elements that all ranks receive, the steps' largest loads, the number of steps
    def ways(here: NdSbp, reached: tuple[int, int, int]) -> Iterator[tuple[NdSbp, tuple[int, int, int]]]:
        for after, total, load, held in _edges(source.placement, source.shape, options, here):
            new = (reached[0] + total, reached[1] + load, reached[2] + 1)
            if new[0] <= bound and held <= largest:
                yield after, new

    return _cheapest(source, target, (0, 0, 0), ways)


def quickest_chain(
    source: Layout, target: Layout, seconds: Callable[[Step], float], limit: float
) -> tuple[Step, ...] | None:
    """The chain of named steps that takes the least time, by the same search with seconds as the cost.

    On hosts with slow links it is the hierarchical one: on 2x2, rows being hosts, `P,P -> B,B` is summed and scattered
    within a host, the parts summed across hosts, then gathered within. The links between hosts carry 2/3 of the bytes
    of one all-reduce over four ranks, and all ranks together receive no more.

    Args:
        source, target: layouts on one placement.
        seconds: returns the seconds that a step takes.
        limit: seconds of the best plan that is known: no chain that takes longer is looked for.

    Returns:
        None where no chain takes less than `limit`.
    """
    if source.placement.ndim > SEARCHED_AXES or not (source.divides and target.divides) or 0 in source.shape:
        return None
    largest = max(shard_size(source), shard_size(target))
    options = _layouts_on_the_way(source, target)

    def ways(here: NdSbp, reached: float) -> Iterator[tuple[NdSbp, float]]:
        before = Layout(source.placement, here, source.shape)
        for after, _, _, held in _edges(source.placement, source.shape, options, here):
            step = named_step(before, Layout(source.placement, after, source.shape)) if held <= largest else None
            if step is not None and (new := reached + seconds(step)) < limit:
                yield after, new

    return _cheapest(source, target, 0.0, ways)


def _cheapest(
    source: Layout, target: Layout, start: C, ways: Callable[[NdSbp, C], Iterable[tuple[NdSbp, C]]]
) -> tuple[Step, ...] | None:
    """Dijkstra's algorithm: the steps from the source to the target on the cheapest way; None where there is no way.

    Args:
        source, target: layouts on one placement.
        start: the cost of no step.
        ways: takes a layout and the cost of the way to it; yields the layouts one step on, with their costs.
    """
    best = {source.nd_sbp: start}
    previous: dict[NdSbp, NdSbp] = {}
    queue = [(start, 0, source.nd_sbp)]
    numbers = itertools.count(1)  # of equals the one found first: layouts cannot be compared
    while queue:
        reached, _, here = heapq.heappop(queue)
        if here == target.nd_sbp:
            break
        # an older entry of a layout to which a cheaper way was found since
        if reached > best[here]:
            continue
        for after, new in ways(here, reached):
            if after not in best or new < best[after]:
                best[after], previous[after] = new, here
                heapq.heappush(queue, (new, next(numbers), after))
    if target.nd_sbp not in previous:
        return None
    path = [target.nd_sbp]
    while path[-1] != source.nd_sbp:
        path.append(previous[path[-1]])
    layouts = [Layout(source.placement, nd_sbp, source.shape) for nd_sbp in reversed(path)]
    steps = [named_step(before, after) for before, after in itertools.pairwise(layouts)]
    return tuple(step for step in steps if step is not None)


def _layouts_on_the_way(source: Layout, target: Layout) -> tuple[NdSbp, ...]:
    """The layouts that a chain may pass through."""
    return tuple(
        nd_sbp
        for nd_sbp in itertools.product(parts_on_the_way(source, target), repeat=source.placement.ndim)
        if Layout(source.placement, nd_sbp, source.shape).divides
    )


def parts_on_the_way(source: Layout, target: Layout) -> list[Sbp]:
    """Return the sbps that a chain may put on an axis: any split of either end, B, and P where either has one.

    Where neither end has a split, sums are made in blocks of the first dim that all axes together can split.
    """
    parts = dict.fromkeys((*source.nd_sbp, *target.nd_sbp))
    splits = [part for part in parts if isinstance(part, Split)]
    # a P that neither end has would only add summands that have to be summed again
    has_partial = source.has_partial or target.has_partial
    if has_partial and not splits:
        splits = [split(dim) for dim, n in enumerate(source.shape) if n % source.placement.size == 0][:1]
    # the first chain found is taken of equals, so the order of options must not depend on the order of the ends
    splits.sort(key=lambda part: part.dim)
    return [*splits, broadcast, *([partial_sum] if has_partial else [])]


@functools.lru_cache(maxsize=4096)
def _edges(
    placement: Placement, shape: tuple[int, ...], options: tuple[NdSbp, ...], here: NdSbp
) -> tuple[tuple[NdSbp, int, int, int], ...]:
    """The layouts one named step away: elements received by all ranks, by the most loaded one, and held by a rank."""
    source = Layout(placement, here, shape)
    edges: list[tuple[NdSbp, int, int, int]] = []
    for nd_sbp in options:
        target = Layout(placement, nd_sbp, shape)
        kind = kind_of(source, target) if nd_sbp != here else "exchange"
        if kind != "exchange":
            received = cost.of_collective(kind, Exchange(source, target, unchanged_axes(source, target)))
            if received is not None:
                edges.append((nd_sbp, *received, shard_size(target)))
    return tuple(edges)
