"""Pictures of schedules: a row for each rank, time to the right."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from keras_flow.pictures import svg
from keras_flow.pictures.drawing import Drawing
from keras_flow.schedules.action import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from keras_flow.schedules.timing import Costs

if TYPE_CHECKING:
    from keras_flow.schedules.schedule import Schedule

#: each kind's colour
_COLOURS = {FORWARD: svg.colour(0), BACKWARD: svg.colour(1), INPUTS: svg.colour(1), WEIGHTS: svg.colour(2)}
_WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUTS: "backward by inputs", WEIGHTS: "backward by weights"}
_LEFT, _TALL, _GAP = 48.0, 24.0, 4.0
#: characters that a terminal's line has for a step
_COLUMNS = 200


def draw(schedule: Schedule, costs: Costs, begun: Mapping[Action, float]) -> Drawing:
    """Return the picture of a schedule.

    Args:
        schedule: what is drawn.
        costs: how wide its actions are.
        begun: when each begins.
    """
    return Drawing(_svg(schedule, costs, begun), _words(schedule, costs, begun))


def _svg(schedule: Schedule, costs: Costs, begun: Mapping[Action, float]) -> str:
    end = max(time + costs[action] for action, time in begun.items())
    unit = max(720.0, 14.0 * schedule.microbatches * 3 * schedule.chunks) / end
    parts = []
    for rank, order in enumerate(schedule.orders):
        y = rank * (_TALL + _GAP)
        parts.append(svg.text(_LEFT - 8, y + 16, f"rank {rank}", 11, "end", dim=True))
        for action in order:
            x, wide = _LEFT + begun[action] * unit, costs[action] * unit
            # a rank's second stage is paler
            opacity = 0.75 if action.stage < schedule.ranks else 0.35
            note = f"stage {action.stage}, micro-batch {action.microbatch}: {_WORDS[action.kind]}"
            parts.append(svg.box(x, y, wide, _TALL, _COLOURS[action.kind], opacity, note))
            if wide > 9:
                parts.append(svg.text(x + wide / 2, y + 16, str(action.microbatch), 10))
    y = schedule.ranks * (_TALL + _GAP) + 14
    kinds = [k for k in (FORWARD, BACKWARD, INPUTS, WEIGHTS) if any(k == a.kind for o in schedule.orders for a in o)]
    for place, kind in enumerate(kinds):
        parts.append(svg.box(_LEFT + place * 160, y - 10, 12, 12, _COLOURS[kind], 0.75))
        parts.append(svg.text(_LEFT + place * 160 + 18, y, _WORDS[kind], 11, "start", dim=True))
    return svg.picture(_LEFT + end * unit + 8, y + 10, parts, repr(schedule))


def _words(schedule: Schedule, costs: Costs, begun: Mapping[Action, float]) -> str:
    """Cells of the smallest cost, each with an action's kind and micro-batch; a rank's first stage in upper case."""
    end = max(time + costs[action] for action, time in begun.items())
    wide = 1 + len(str(schedule.microbatches - 1))
    unit = max(min(filter(None, (costs[action] for action in begun))), end * (wide + 1) / _COLUMNS)
    lines = []
    for rank, order in enumerate(schedule.orders):
        cells = ["·" * wide] * ceil(end / unit - 1e-9)
        for action in order:
            kind = action.kind if action.stage < schedule.ranks else action.kind.lower()
            text = f"{kind}{action.microbatch}".ljust(wide)
            first, last = round(begun[action] / unit), round((begun[action] + costs[action]) / unit)
            cells[first:last] = [text] * (last - first)
        lines.append(f"{rank} {' '.join(cells)}")
    return "\n".join(lines)
