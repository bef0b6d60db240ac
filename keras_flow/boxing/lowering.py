"""Lowering: the collectives that JAX runs where a plan has an exchange of slices.

XLA's own collectives are several times faster than messages that a program packs and adds. So an exchange becomes a
chain of named steps wherever these receive as few bytes in total, also where a plan cannot say so:

- with the axes of the placement in another order. Where two axes split one dim, a permute makes the outer of them the
  inner one, and along the inner one collectives work;
- with axes of prime sizes. Along an axis of 4 ranks a shard may have to go to two of them, which is no collective along
  the axis but is one along half of it;
- around a smaller exchange, along two axes.

The specification's plan stays the one of slices, which torch and TensorFlow run by one all-to-all; `plan.explain` names
both.

Example: `P,S(0) -> S(0),S(0)` on 2x2. Ranks that differ on axis 0 hold summands of the same rows. They reduce and
scatter them inside those rows, which leaves the rows cut by axis 1 first and axis 0 second; then a permute puts them in
the order of the target.

    >>> from keras_flow.boxing import plan
    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> planned = plan(Layout(mesh, "P,S(0)", (8, 4)), Layout(mesh, "S(0),S(0)", (8, 4)))
    >>> [step.kind for step in planned.steps], [step.kind for step in lower(planned).steps]
    (['exchange'], ['reduce_scatter', 'permute'])

Limits: one placement; up to 3 axes of prime sizes; layouts that divide evenly. The most loaded rank may receive more
than in the plan, all ranks together never do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from keras_flow.boxing.blocks import Blocks
from keras_flow.boxing.choice import preferred
from keras_flow.boxing.collectives import can_permute, named_step, unchanged_axes
from keras_flow.boxing.cost import shard_size
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.search import SEARCHED_AXES, cheapest_chain, parts_on_the_way
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Sbp

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan


def lower(plan: BoxingPlan) -> BoxingPlan:
    """The plan by named steps, where they receive as few bytes in total; else with exchanges that have fewer messages.

    A plan without exchange stays as it is. Of several ways the one that `preferred` says, then the shortest.
    """
    plain = Exchange(plan.source, plan.target)
    if not plain.same_placement or all(step.kind != "exchange" for step in plan.steps):
        return plan
    chain = cheapest_chain(plan.source, plan.target)
    chains = [*([chain] if chain else []), *_transposed_chains(plan.source, plan.target)]
    # chains first: an exchange inside is what they avoid
    for ways in (chains, _around_exchanges(plan.source, plan.target)):
        lowered = [replace(plan, steps=steps) for steps in ways]
        as_few = [way for way in lowered if way.total_bytes <= plan.total_bytes]
        if as_few:
            return preferred(sorted(as_few, key=lambda way: len(way.steps)))
    return plan


def _transposed_chains(source: Layout, target: Layout) -> Iterator[tuple[Step, ...]]:
    """Chains of collectives with the axes of the placement in another order.

    Every order is tried in which exactly one end keeps its shards; a permute at the other end leads from or to the
    order of the plan.
    """
    for order in itertools.permutations(range(source.placement.ndim)):
        source_stays, target_stays = _keeps_shards(source, order), _keeps_shards(target, order)
        # if both stay it is the plain chain that was searched already; if neither does, one permute is not enough
        if source_stays == target_stays or not can_permute(target if source_stays else source):
            continue
        before, after = _transposed(source, order), _transposed(target, order)
        steps = cheapest_chain(before, after)
        if steps is not None and source_stays:
            yield *steps, Step.of("permute", Exchange(after, target))
        elif steps is not None:
            yield Step.of("permute", Exchange(source, before)), *steps


def _transposed(layout: Layout, order: tuple[int, ...]) -> Layout:
    """The layout with the axes of its placement in another order; each axis keeps its sbp."""
    placement = layout.placement
    ranks = np.reshape(placement.ranks, placement.hierarchy).transpose(order)
    names = tuple(placement.axis_names[axis] for axis in order)
    nd_sbp = tuple(layout.nd_sbp[axis] for axis in order)
    return Layout(Placement(ranks, names, placement.type), nd_sbp, layout.shape)


def _keeps_shards(layout: Layout, order: tuple[int, ...]) -> bool:
    """Whether `_transposed` leaves every rank its shard: no two axes that split one dim change places."""
    return all(list(axes) == [axis for axis in order if axis in axes] for axes in Blocks(layout).axes_of_dim)


def _around_exchanges(source: Layout, target: Layout) -> Iterator[tuple[Step, ...]]:
    """Exchanges along two axes of the refined placement, with named steps along the other axes before and after.

    Only for targets that several ranks hold: without copies there is nothing to gather after a smaller exchange.
    """
    placement = refined(source.placement)
    # with two axes there are none around an exchange along two
    if not 2 < placement.ndim <= SEARCHED_AXES or not Blocks(target).copy_axes:
        return
    if not (source.divides and target.divides) or 0 in source.shape:
        return
    source, target = _on_refined(source, placement), _on_refined(target, placement)
    largest = max(shard_size(source), shard_size(target))
    for pair in itertools.combinations(range(placement.ndim), 2):
        for others in itertools.product(parts_on_the_way(source, target), repeat=placement.ndim - 2):
            # on the pair of axes the exchange leads from the source to the target, on the others it changes nothing
            before, after = (_with_parts(end, pair, others) for end in (source, target))
            if not (before.divides and after.divides) or max(shard_size(before), shard_size(after)) > largest:
                continue
            first, last = named_step(source, before), named_step(after, target)
            if first is not None and last is not None:
                middle = named_step(before, after)
                if middle is None:
                    middle = Step.of("exchange", Exchange(before, after, unchanged_axes(before, after)))
                steps = (first, middle, last)
                yield tuple(step for step in steps if step.exchange.source != step.exchange.target)


def _with_parts(layout: Layout, pair: tuple[int, int], others: Sequence[Sbp]) -> Layout:
    """The layout with other sbps on all axes but two."""
    of_others = iter(others)
    nd_sbp = [part if axis in pair else next(of_others) for axis, part in enumerate(layout.nd_sbp)]
    return Layout(layout.placement, nd_sbp, layout.shape)


def refined(placement: Placement) -> Placement:
    """Return the ranks in their order, on axes of prime sizes: an axis of 4 becomes two of 2.

    Example:
        >>> refined(Placement([[0, 1, 2, 3], [4, 5, 6, 7]])).hierarchy
        (2, 2, 2)
    """
    sizes = [factor for size in placement.hierarchy for factor in _prime_factors(size)]
    if len(sizes) == placement.ndim:
        return placement
    return Placement(np.reshape(placement.ranks, sizes), type=placement.type)


def _on_refined(layout: Layout, placement: Placement) -> Layout:
    """Return the layout on the refined placement: all factors of an axis have its sbp, so that shards stay."""
    parts = zip(layout.nd_sbp, layout.placement.hierarchy, strict=True)
    return Layout(placement, [part for part, size in parts for _ in _prime_factors(size)], layout.shape)


def _prime_factors(size: int) -> list[int]:
    """Prime factors in ascending order, by trial division; `[1]` of 1."""
    factors: list[int] = []
    factor = 2
    while factor <= math.isqrt(size):
        if size % factor == 0:
            factors.append(factor)
            size //= factor
        else:
            factor += 1
    return [*factors, size]
