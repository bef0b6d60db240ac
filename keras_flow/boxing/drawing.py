"""A plan as arrows between ranks, for a notebook and for a file."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from keras_flow.boxing.lower_bound import lower_bound
from keras_flow.errors import FlowError
from keras_flow.pictures import ranks as pictures
from keras_flow.pictures.drawing import Drawing
from keras_flow.pictures.svg import side_by_side
from keras_flow.units import amount, counted

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan

#: of more ranks the arrows cannot be told apart, on a page and in a file
_MOST_RANKS, _MOST_IN_FILE = 16, 32


def draw(plan: BoxingPlan) -> str | None:
    """The source, the steps with their messages and bytes, and the target; None for many ranks."""
    if len(plan.ranks) > _MOST_RANKS:
        return None
    return (
        f"<div>{html.escape(_words(plan))}</div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start'>{''.join(_parts(plan))}</div>"
    )


def drawing(plan: BoxingPlan) -> Drawing:
    """Draw all of it as one picture.

    Raises:
        FlowError: there are too many ranks to show.
    """
    if len(plan.ranks) > _MOST_IN_FILE:
        raise FlowError(
            f"a picture shows up to {_MOST_IN_FILE} ranks, this plan has {len(plan.ranks)}: leave out --png and --svg"
        )
    return Drawing(side_by_side(_parts(plan), "boxing plan"), _words(plan))


def _words(plan: BoxingPlan) -> str:
    bound = amount(lower_bound(plan.source, plan.target, plan.dtype))
    return (
        f"{counted(len(plan.steps), 'step')} for {list(plan.source.shape)} {plan.dtype}: {amount(plan.total_bytes)} "
        f"received in all; no correct plan receives less than {bound}"
    )


def _parts(plan: BoxingPlan) -> list[str]:
    """The pictures of the source, of the steps and of the target."""
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
    # a side of very many ranks has no picture
    return list(filter(None, (plan.source.picture(), pictures.plan(plan.ranks, steps, moved), plan.target.picture())))
