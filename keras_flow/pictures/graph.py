"""The picture of a model: its layers as boxes, layouts on the edges between them, collectives beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_flow.pictures.svg import TRAFFIC, box, colour, line, picture, text

_WIDE, _HIGH, _GAP, _COLUMN = 250.0, 46.0, 40.0, 300.0


@dataclass(frozen=True)
class Node:
    """A layer.

    Attributes:
        name: its path.
        kind: its class.
        variables: name and layout of each of its variables.
        inputs: keys of tensors.
        outputs: keys of tensors.
        sends: its collectives, one text each.
    """

    name: str
    kind: str
    variables: Sequence[tuple[str, str]]
    inputs: Sequence[int]
    outputs: Sequence[int]
    sends: Sequence[str]


@dataclass(frozen=True)
class Edge:
    """A tensor: its shape and layout in words, and whether it is split."""

    words: str
    is_split: bool


def graph(title: str, inputs: Sequence[int], nodes: Sequence[Node], tensors: dict[int, Edge]) -> str:
    """Layers from top to bottom in the order of their calls, branches side by side."""
    columns = _columns(inputs, nodes)
    right = 20 + _COLUMN * (max(columns.values(), default=0) + 1)
    parts, places = [text(10, 18, title, 13, "start")], dict[int, tuple[float, float]]()
    y = 40.0
    for key in inputs:
        x = 20 + _WIDE / 2 + _COLUMN * columns[-1 - key]
        parts += [box(x - _WIDE / 2, y, _WIDE, 26, "#808080", 0.15), text(x, y + 17, "input", 12)]
        places[key] = (x, y + 26)
    y += 26 + _GAP
    longest = 0
    for at, node in enumerate(nodes):
        x = 20 + _WIDE / 2 + _COLUMN * columns[at]
        high = _HIGH + 15 * len(node.variables)
        for key in node.inputs:
            if key in places:
                parts += _edge(places[key], (x, y), tensors[key])
        fill = colour(1) if any(layout.count("S(") for _, layout in node.variables) else "#808080"
        parts.append(box(x - _WIDE / 2, y, _WIDE, high - 12, fill, 0.22))
        parts.append(text(x, y + 16, node.name, 12))
        parts.append(text(x, y + 29, node.kind, 10, dim=True))
        for row, (name, layout) in enumerate(node.variables):
            parts.append(text(x, y + 45 + 15 * row, f"{name}: {layout}", 11))
        for row, words in enumerate(node.sends):
            middle = y + 12 + 15 * row
            if row == 0:
                parts.append(line(x + _WIDE / 2, middle - 4, right - 6, middle - 4, TRAFFIC, 1.2, "4 3"))
            parts.append(f"<circle cx='{right}' cy='{middle - 4:.1f}' r='4' fill='{TRAFFIC}'/>")
            parts.append(text(right + 9, middle, words, 11, "start"))
            longest = max(longest, len(words))
        places |= {key: (x, y + high - 12) for key in node.outputs}
        y += max(high, 15.0 * len(node.sends)) - 12 + _GAP
    return picture(right + 20 + 6.1 * longest, y - _GAP + 16, parts, title)


def _edge(start: tuple[float, float], end: tuple[float, float], tensor: Edge) -> list[str]:
    (x1, y1), (x2, y2) = start, end
    middle = (y1 + y2) / 2
    path = (
        f"<path d='M{x1:.1f},{y1:.1f} C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}' fill='none' "
        f"stroke='{colour(0) if tensor.is_split else 'currentColor'}' stroke-width='{2.2 if tensor.is_split else 1.2}' "
        "stroke-opacity='.8'/>"
    )
    return [path, text(x2 + 6, y2 - 12, tensor.words, 10.5, "start")]


def _columns(inputs: Sequence[int], nodes: Sequence[Node]) -> dict[int, int]:
    """The column of each node by its number, of an input by -1 - its key: the first that no other branch is using."""
    last_use = {key: at for at, node in enumerate(nodes) for key in node.inputs}
    columns = {-1 - key: place for place, key in enumerate(inputs)}
    column_of = {key: place for place, key in enumerate(inputs)}
    for at, node in enumerate(nodes):
        wanted = [column_of[key] for key in node.inputs if key in column_of]
        # a tensor that a later node still reads keeps its column free of boxes: its edge runs down there
        busy = {column for key, column in column_of.items() if last_use.get(key, -1) > at}
        free = (place for place in (*sorted(wanted), *range(len(nodes) + len(inputs))) if place not in busy)
        columns[at] = next(free, 0)
        column_of |= dict.fromkeys(node.outputs, columns[at])
    return columns
