"""Named steps: which change of layout is which collective.

Engines run these as their own collectives, in groups along the axes that change.

    >>> from keras_flow.placements import Placement
    >>> mesh = Placement([[0, 1], [2, 3]])
    >>> def kind(before, after):
    ...     step = named_step(Layout(mesh, before, (4, 4)), Layout(mesh, after, (4, 4)))
    ...     return step and step.kind
    >>> kind("B,B", "S(0),B"), kind("S(0),B", "S(0),S(0)")
    ('local_slice', 'local_slice')
    >>> kind("B,B", "P,S(0)"), kind("S(0),B", "P,B")
    ('local_keep', 'local_keep')
    >>> kind("S(0),S(1)", "S(1),S(0)")
    'permute'
    >>> kind("S(0),S(1)", "B,B"), kind("S(0),S(0)", "S(0),B")
    ('all_gather', 'all_gather')
    >>> kind("P,P", "S(0),S(1)"), kind("S(0),P", "S(0),S(0)")
    ('reduce_scatter', 'reduce_scatter')
    >>> kind("P,B", "B,B")
    'all_reduce'
    >>> kind("B,S(0)", "B,S(1)")
    'all_to_all'

Limits: with two axes on one dim only the inner one can be gathered or scattered alone, because the outer one's blocks
are cut again. So this is no named step, and takes an exchange of slices or a chain of named steps:

    >>> kind("S(0),S(0)", "B,S(0)")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from keras_flow.boxing.blocks import Blocks
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.step import Step
from keras_flow.layout import Layout
from keras_flow.sbp import Broadcast, PartialSum, Sbp, Split


@dataclass(frozen=True)
class Change:
    """Two layouts on one placement, and in what they differ."""

    source: Blocks
    target: Blocks

    @cached_property
    def parts(self) -> list[tuple[Sbp, Sbp]]:
        """Before and after, of the axes that change."""
        pairs = zip(self.source.layout.nd_sbp, self.target.layout.nd_sbp, strict=True)
        return [(before, after) for before, after in pairs if before != after]

    def is_all(self, before: type | None = None, after: type | None = None) -> bool:
        """Whether all axes that change do so from one sbp to another; None allows any."""
        return all(
            (before is None or isinstance(old, before)) and (after is None or isinstance(new, after))
            for old, new in self.parts
        )

    @cached_property
    def cuts_further(self) -> bool:
        """Whether the target cuts the blocks of the source: no dim loses an axis, and new ones are inside."""
        dims = zip(self.source.axes_of_dim, self.target.axes_of_dim, strict=True)
        return all(before == after[: len(before)] for before, after in dims)

    @cached_property
    def joins(self) -> bool:
        """Whether the target's blocks are whole blocks of the source: each dim loses inner axes only."""
        dims = zip(self.source.axes_of_dim, self.target.axes_of_dim, strict=True)
        return all(after == before[: len(after)] for before, after in dims)

    @cached_property
    def same_grid(self) -> bool:
        """Whether both cut the tensor into the same blocks, all of one shape, so that whole shards change hands."""
        shape = self.source.layout.shape
        before, after = (
            [blocks.sizes_of(axes) for axes in blocks.axes_of_dim] for blocks in (self.source, self.target)
        )
        # uneven blocks of one grid may differ in shape, and a shard would not fit its new rank
        return before == after and all(length % parts == 0 for length, parts in zip(shape, before, strict=True))

    @cached_property
    def moves_one_inner_axis(self) -> bool:
        """Whether one axis changes, the innermost of its dim on both sides, the others being in the same order."""
        pairs = list(zip(self.source.layout.nd_sbp, self.target.layout.nd_sbp, strict=True))
        for before, after in zip(self.source.axes_of_dim, self.target.axes_of_dim, strict=True):
            # the axes that stay must be the outer ones of the dim, or the moved axis would cut their blocks anew
            kept = tuple(axis for axis in before if pairs[axis][0] == pairs[axis][1])
            if before[: len(kept)] != kept or after[: len(kept)] != kept:
                return False
        return len(self.parts) == 1


@dataclass(frozen=True)
class Kind:
    """A kind of step: what it does in its groups, and which changes of layout it makes."""

    does: str
    fits: Callable[[Change], bool]


#: name -> kind. Of those that fit a change the first holds: a permute is cheaper than the same change as an all-to-all
KINDS: dict[str, Kind] = {
    "local_slice": Kind(
        "every rank cuts its shard out of what it holds",
        lambda change: change.cuts_further and change.is_all(Broadcast, Split),
    ),
    "local_keep": Kind(
        "one rank of each family keeps the value, the others hold zeros",
        lambda change: (
            (change.cuts_further and change.is_all(before=Broadcast))
            or (change.joins and change.is_all(after=PartialSum))
        ),
    ),
    "permute": Kind(
        "every rank takes over the whole shard of one rank",
        lambda change: change.is_all(Split, Split) and change.same_grid,
    ),
    "all_gather": Kind(
        "every rank receives the shards of its group",
        lambda change: change.joins and change.is_all(Split, Broadcast),
    ),
    "reduce_scatter": Kind(
        "summands are added, each rank ends with its block of the sum",
        lambda change: change.cuts_further and change.is_all(PartialSum, Split),
    ),
    "all_reduce": Kind(
        "summands are added, each rank ends with the whole sum",
        lambda change: change.is_all(PartialSum, Broadcast),
    ),
    "all_to_all": Kind(
        "every rank sends a block to each rank of its group",
        lambda change: change.is_all(Split, Split) and change.moves_one_inner_axis,
    ),
    "exchange": Kind(
        "ranks send each other the common elements of their shards, adding summands where there are any",
        lambda change: True,
    ),
}


def kind_of(source: Layout, target: Layout) -> str:
    """The kind of the step between two layouts on one placement; `exchange` where it is no collective."""
    change = Change(Blocks(source), Blocks(target))
    return next(name for name, kind in KINDS.items() if kind.fits(change))


def named_step(source: Layout, target: Layout) -> Step | None:
    """The collective, in groups along the changed axes, that changes one layout into the other; None without one."""
    kind = kind_of(source, target)
    if kind == "exchange":
        return None
    return Step.of(kind, Exchange(source, target, unchanged_axes(source, target)))


def unchanged_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes that have the same sbp in both layouts."""
    pairs = zip(source.nd_sbp, target.nd_sbp, strict=True)
    return tuple(axis for axis, (before, after) in enumerate(pairs) if before == after)


def fits_kind(step: Step) -> bool:
    """Whether a step does what its kind says."""
    exchange = step.exchange
    if step.kind == "exchange":
        return True
    if exchange.same_placement:
        # also the groups: a collective along fewer axes than change leaves the wrong values
        return step == named_step(exchange.source, exchange.target)
    ends = exchange.source, exchange.target  # a permute may lead to the same ranks with their axes in another order
    same_ranks = len({tuple(sorted(end.placement.ranks)) for end in ends}) == 1
    return (
        step.kind == "permute"
        and same_ranks
        and all(map(can_permute, ends))
        and Change(exchange.source_blocks, exchange.target_blocks).same_grid
    )


def can_permute(layout: Layout) -> bool:
    """Whether each block has one holder and all are of one shape, so that whole shards can change hands."""
    return layout.divides and len(Blocks(layout).split_axes) == layout.placement.ndim


def axis_by_axis(source: Layout, target: Layout, order: Iterable[int]) -> list[tuple[Layout, Layout]]:
    """The layouts before and after each change of one axis, in this order; axes that do not change are left out."""
    layouts, parts = [source], list(source.nd_sbp)
    for axis in order:
        if parts[axis] != target.nd_sbp[axis]:
            parts[axis] = target.nd_sbp[axis]
            layouts.append(Layout(source.placement, tuple(parts), source.shape))
    return list(itertools.pairwise(layouts))
