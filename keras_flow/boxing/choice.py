"""Which of several plans is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from keras_flow.boxing.topology import Topology, plan_time

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan


def preferred(candidates: Iterable[BoxingPlan], topology: Topology | None = None) -> BoxingPlan:
    """The plan to take: the order of preference.

    With a topology least time, then fewest bytes, then fewest steps; without one fewest bytes, then the lowest load of
    the most loaded rank. Of equals the first.

    Example:
        >>> from keras_flow.boxing import plan
        >>> from keras_flow.layout import Layout
        >>> from keras_flow.placements import Placement
        >>> mesh = Placement([[0, 1], [2, 3]])
        >>> more, fewer = (plan(Layout(mesh, "P,P", (8, 8)), Layout(mesh, to, (8, 8))) for to in ("B,B", "S(0),S(1)"))
        >>> more.total_bytes, fewer.total_bytes, preferred([more, fewer]) is fewer
        (1536, 768, True)
    """
    if topology is not None:
        return min(candidates, key=lambda plan: (plan_time(plan, topology), plan.total_bytes, len(plan.steps)))
    best, *rest = candidates
    for candidate in rest:
        # not `most_loaded` of both: of 65,536 ranks and a P in the target that takes seconds
        if candidate.total_bytes < best.total_bytes or (
            candidate.total_bytes == best.total_bytes and not candidate.some_rank_receives(best.most_loaded)
        ):
            best = candidate
    return best
