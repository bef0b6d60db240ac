"""A plan as arrows between ranks, for a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from keras_flow.boxing.lower_bound import lower_bound
from keras_flow.pictures import ranks as pictures
from keras_flow.units import amount, counted

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan

#: of more ranks the arrows cannot be told apart
_MOST_RANKS = 16


def draw(plan: BoxingPlan) -> str | None:
    """The source, the steps with their messages and bytes, and the target; None for many ranks."""
    if len(plan.ranks) > _MOST_RANKS:
        return None
    sent: dict[int, list[tuple[int, int, int]]] = {number: [] for number in range(len(plan.steps))}
    for rank in plan.ranks:
        for part in plan.for_rank(rank):
            sent[part.step] += [
                (message.sender, rank, message.piece.size * plan.itemsize)
                for message in part.receives
                if message.piece.size
            ]
    steps = [pictures.DrawnStep(str(step), sent[number]) for number, step in enumerate(plan.steps)]
    moved = [f"{amount(sum(size for *_, size in step.messages))} received in all" for step in steps]
    bound = amount(lower_bound(plan.source, plan.target, plan.dtype))
    shape = list(plan.source.shape)
    words = (
        f"{counted(len(steps), 'step')} for {shape} {plan.dtype}: {amount(plan.total_bytes)} "
        f"received in all; no correct plan receives less than {bound}"
    )
    sides = (plan.source.picture(), plan.target.picture())
    return (
        f"<div>{html.escape(words)}</div><div style='display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start'>"
        f"{sides[0]}{pictures.plan(plan.ranks, steps, moved)}{sides[1]}</div>"
    )
