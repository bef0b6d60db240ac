"""Pictures of ranks: a placement as a grid, and a tensor's blocks with the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_flow.pictures.svg import arrow, box, colour, line, picture, text
from keras_flow.units import numbered

#: of more ranks than this a picture says less than a line of text
MOST_RANKS = 256
_CELL = 34.0
#: the length of a tensor's longer side
_SIDE = 190.0
_SHEET = 7.0
#: of what several ranks hold
_GREY = "#8892a6"


@dataclass(frozen=True)
class Block:
    """A part of a tensor, as rows and columns, and who holds it.

    Attributes:
        rows: first and last + 1.
        columns: likewise.
        sheets: the ranks with equal values; several where the tensor is the sum of what they hold.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    sheets: tuple[tuple[int, ...], ...]


def placement(ranks: Sequence[int], hierarchy: Sequence[int], names: Sequence[str]) -> str:
    """Devices as a grid: the last axis to the right, the one before it down, further ones as panels side by side."""
    columns = hierarchy[-1]
    rows = hierarchy[-2] if len(hierarchy) > 1 else 1
    panels = len(ranks) // (rows * columns)
    cell = _CELL if len(ranks) <= 64 else 18.0
    left, top, gap = (24.0 if len(hierarchy) > 1 else 4.0), 24.0, 18.0
    parts = []
    for panel in range(panels):
        x0 = left + panel * (columns * cell + gap)
        parts.append(text(x0 + columns * cell / 2, 14, f"{names[-1]} →", 11, dim=True))
        for at in range(rows * columns):
            rank = ranks[panel * rows * columns + at]
            x, y = x0 + at % columns * cell, top + at // columns * cell
            parts.append(box(x + 1, y + 1, cell - 2, cell - 2, colour(rank), note=f"rank {rank}"))
            parts.append(text(x + cell / 2, y + cell / 2 + 4, str(rank), 12 if cell == _CELL else 8))
    if len(hierarchy) > 1:
        middle = top + rows * cell / 2
        side = f"<g transform='rotate(90 8 {middle:.0f})'>{text(8, middle, f'{names[-2]} →', 11, dim=True)}</g>"
        parts.append(side)
    if panels > 1:
        outer = " × ".join(f"{name} {size}" for name, size in zip(names[:-2], hierarchy[:-2], strict=True))
        parts.append(text(left, top + rows * cell + 14, f"panels: {outer}", 11, "start", dim=True))
    width = max(left + panels * (columns * cell + gap), 8.0 * max(map(len, names)) + left)
    return picture(width, top + rows * cell + (20 if panels > 1 else 4), parts, f"placement of {len(ranks)} ranks")


def blocks(shape: tuple[int, int], held: Sequence[Block], title: str, width: float = _SIDE) -> str:
    """A tensor as a rectangle of blocks, each in the colours of the ranks that hold it; sums as stacked sheets.

    Args:
        shape: rows and columns of the drawn matrix.
        held: its blocks.
        title: what stands above.
        width: the width of the drawing; its height follows the tensor's proportions, within limits.
    """
    rows, columns = (max(1, length) for length in shape)
    high = min(width, max(34.0, width * rows / columns))
    deep = max((len(block.sheets) for block in held), default=1)
    shift = _SHEET * (min(deep, 5) - 1)
    left, top = 4.0, 22.0
    parts = [text(left, 14, title, 12, "start")]
    sides: list[list[str]] = [[] for _ in range(min(deep, 5))]
    for block in held:
        x, y = left + width * block.columns[0] / columns, top + high * block.rows[0] / rows
        wide = width * (block.columns[1] - block.columns[0]) / columns
        tall = high * (block.rows[1] - block.rows[0]) / rows
        if wide <= 0 or tall <= 0:
            continue
        sides[0] += _front(x, y, wide, tall, block.sheets)
        for depth, ranks in enumerate(block.sheets[1:5], start=1):
            # what is not hidden by the sheet before: a strip at the right, and one below
            x1, y1, back, front = x + depth * _SHEET, y + depth * _SHEET, depth * _SHEET, (depth - 1) * _SHEET
            right, bottom = left + width + front, top + high + front
            sides[depth] += _strip(max(x1, right), y1, x1 + wide, min(y1 + tall, top + high + back), ranks)
            sides[depth] += _strip(x1, max(y1, bottom), min(x1 + wide, left + width + back), y1 + tall, ranks)
    parts += [part for side in reversed(sides) for part in side]
    return picture(left + width + shift + 6, top + high + shift + 6, parts, title)


def _strip(x1: float, y1: float, x2: float, y2: float, ranks: Sequence[int]) -> list[str]:
    """The visible edge of a sheet behind the first one."""
    note = f"a summand, held by {numbered(ranks)}"
    return [box(x1, y1, x2 - x1, y2 - y1, colour(ranks[0]), note=note)] if x2 > x1 and y2 > y1 else []


def _front(x: float, y: float, wide: float, tall: float, sheets: Sequence[Sequence[int]]) -> list[str]:
    """The first sheet of a block, with the numbers of the ranks that hold it; sums as `0 + 2`.

    What several ranks hold is grey below a seam of their colours: stripes would look like a split.
    """
    ranks = sheets[0]
    shown = ranks[:8]
    stripe, seam = wide / len(shown), tall if len(shown) == 1 else min(6.0, 0.2 * tall)
    parts = [] if len(shown) == 1 else [box(x, y, wide, tall, _GREY)]
    for at, rank in enumerate(shown):
        parts.append(
            f"<rect x='{x + at * stripe:.1f}' y='{y:.1f}' width='{stripe:.1f}' height='{seam:.1f}' "
            f"fill='{colour(rank)}' fill-opacity='.45'/>"
        )
    summands = f"; the sum of {len(sheets)} such sheets" if len(sheets) > 1 else ""
    parts.append(box(x, y, wide, tall, note=f"held by {numbered(ranks)}{summands}"))
    words = ", ".join(map(str, shown)) + (" …" if len(ranks) > len(shown) else "")
    if len(sheets) > 1:
        words = " + ".join(str(sheet[0]) for sheet in sheets[:4]) + (" + …" if len(sheets) > 4 else "")
    size = min(13.0, tall * 0.6, 1.7 * wide / max(2, len(words)))
    if size >= 5:
        below = 0.0 if len(shown) == 1 else seam / 2
        parts.append(text(x + wide / 2, y + tall / 2 + below + size / 3, words, size))
    return parts


@dataclass(frozen=True)
class DrawnStep:
    """A step of a plan.

    Attributes:
        words: what happens.
        messages: sender, receiver and bytes of each message.
    """

    words: str
    messages: Sequence[tuple[int, int, int]]


def plan(ranks: Sequence[int], steps: Sequence[DrawnStep], amount: Sequence[str]) -> str:
    """The steps of a plan as arrows between ranks, thicker the more bytes.

    Args:
        ranks: all that take part.
        steps: in order.
        amount: what each step moves, as text.
    """
    gap, left, high = max(34.0, min(70.0, 460 / max(1, len(ranks)))), 18.0, 78.0
    place = {rank: left + gap * at for at, rank in enumerate(ranks)}
    largest = max((bytes_ for step in steps for *_, bytes_ in step.messages), default=1) or 1
    parts, right = [], left + gap * (len(ranks) - 1) + 26
    for number in range(len(steps) + 1):
        y = 8 + number * high
        for rank, x in place.items():
            parts.append(box(x - 12, y, 24, 20, colour(rank), note=f"rank {rank}"))
            parts.append(text(x, y + 14, str(rank), 11))
    for number, step in enumerate(steps):
        y = 28 + number * high
        for sender, receiver, bytes_ in step.messages:
            note = f"rank {sender} to rank {receiver}: {bytes_:,} bytes"
            parts.append(
                arrow(place[sender], y + 1, place[receiver], y + high - 21, 0.8 + 2.4 * bytes_ / largest, note=note)
            )
        if not step.messages:
            parts += [line(x, y + 1, x, y + high - 21, dash="3 3") for x in place.values()]
        parts.append(text(right, y + high / 2 - 12, step.words, 11, "start"))
        parts.append(text(right, y + high / 2 + 4, amount[number], 11, "start", dim=True))
    longest = max(
        (len(words) for step in zip(steps, amount, strict=True) for words in (step[0].words, step[1])), default=8
    )
    return picture(right + 6.4 * longest, 36 + len(steps) * high, parts, f"plan of {len(steps)} steps")


def matrix_of(shape: Sequence[int], split: Sequence[int]) -> tuple[int, int]:
    """Which two dims of a tensor are drawn as rows and columns: those that are split, otherwise the last two.

    Example:
        >>> matrix_of((8, 3, 3, 16), split=[3]), matrix_of((4, 6), split=[]), matrix_of((7,), split=[0])
        ((0, 3), (0, 1), (-1, 0))
    """
    dims = len(shape)
    if dims < 2:
        return -1, dims - 1
    chosen = sorted(split, key=lambda dim: -shape[dim])[:2]
    rest = [dim for dim in sorted(range(dims), key=lambda dim: -shape[dim]) if dim not in chosen]
    both = sorted((*chosen, *rest[: 2 - len(chosen)]))
    return both[0], both[1]
