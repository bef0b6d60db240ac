"""Curves over steps and bars, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_flow.pictures.svg import box, colour, line, picture, text

_DASH = 9.0
_LEFT, _TOP = 58.0, 30.0
#: width of curves, which a small phone has, and height without their key, in pixels
_CURVES = 336.0, 200.0
#: width of a letter of a name, in pixels
_LETTER = 6.2
#: width of bars, in pixels: that of a phone, where a wider picture would be shrunk with its letters
_BARS = 360.0


@dataclass(frozen=True)
class Curve:
    """One value for each step.

    Attributes:
        name: for the key.
        values: those that are not finite are left out; on a logarithmic scale those that are 0 lie on the floor.
        number: which colour it has.
    """

    name: str
    values: Sequence[float]
    number: int


def curves(
    title: str,
    drawn: Sequence[Curve],
    *,
    bounds: tuple[float, float] | None = None,
    limit: Sequence[float] = (),
    floor: float | None = None,
) -> str:
    """Curves over steps. Those that coincide show as one line whose dashes take their colours in turn.

    Args:
        title: what stands above.
        drawn: the curves.
        bounds: least and greatest value of a linear scale; None takes 0 and the greatest of the curves.
        limit: a value for each step that the curves should stay under, drawn in.
        floor: the scale is logarithmic and begins here; None: linear.
    """
    width, base = _CURVES
    values = [value for curve in drawn for value in curve.values if math.isfinite(value)]
    least, greatest = bounds or (0.0, max([*values, *limit], default=1.0))
    if greatest <= least:  # a loss that never changes, or none that can be drawn
        greatest = least + (abs(least) or 1.0)
    count = max((len(curve.values) for curve in drawn), default=1)
    steps = max(count - 1, 1)
    right = width - 10

    def x_of(step: int) -> float:
        return _LEFT + (right - _LEFT) * step / steps

    def y_of(value: float) -> float:
        if floor is None:
            share = (value - least) / (greatest - least)
        else:
            share = math.log10(max(value, floor) / floor) / max(1e-9, math.log10(greatest * 2 / floor))
        return base - (base - _TOP) * min(1.0, max(0.0, share))

    def points(series: Sequence[float]) -> str:
        pairs = enumerate(series)
        return " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in pairs if math.isfinite(value))

    def path(series: Sequence[float], style: str) -> str:
        if sum(map(math.isfinite, series)) == 1:  # no line goes through one point
            x, y = points(series).split(",")
            return f"<circle cx='{x}' cy='{y}' r='4' {style}/>"
        return f"<polyline points='{points(series)}' {style}/>"

    parts = [text(0, 13, title, 12, "start")]
    for level in _levels(least, greatest, floor):
        parts.append(f"<g opacity='.25'>{line(_LEFT, y_of(level), right, y_of(level))}</g>")
        words = f"{level:.3g}" if floor is None else f"{'≤' * (level < 1.5 * floor)}{level:.0e}"
        parts.append(text(_LEFT - 6, y_of(level) + 4, words, 10, "end", dim=True))
    if limit:
        reach = [*limit] * (1 + (len(limit) == 1))  # of one step it is a line too
        parts.append(path(reach, "fill='none' stroke='#d33' stroke-width='1.5' stroke-dasharray='2 3'"))
        parts.append(text(_LEFT + 4, y_of(limit[0]) - 6, "tolerance", 10, "start"))
    for number, curve in enumerate(drawn):
        dashes = f"{_DASH:g} {_DASH * (len(drawn) - 1):g}" if len(drawn) > 1 else "none"
        # thin and faint below: a curve that lies alone is seen as a line and not only as dashes
        for width_of, opacity, dash in ((1.0, 0.5, "none"), (2.6, 1.0, dashes)):
            style = (
                f"fill='none' stroke='{colour(curve.number)}' stroke-width='{width_of}' stroke-opacity='{opacity}' "
                f"stroke-dasharray='{dash}' stroke-dashoffset='{0 - _DASH * number:g}' stroke-linejoin='round'"
            )
            parts.append(path(curve.values, style))
    parts.append(text(right, base + 12, f"step {count}", 10, "end", dim=True))
    x, y = 0.0, base + 26
    for curve in drawn:
        wide = 26 + _LETTER * len(curve.name)
        if x and x + wide > width:
            x, y = 0.0, y + 14
        parts.append(f"<rect x='{x:.0f}' y='{y - 6:.0f}' width='12' height='5' fill='{colour(curve.number)}'/>")
        parts.append(text(x + 16, y, curve.name, 10.5, "start"))
        x += wide
    return picture(width, y + 5, parts, title)


def _levels(least: float, greatest: float, floor: float | None) -> list[float]:
    if floor is None:
        return [least, (least + greatest) / 2, greatest]
    first, last = math.ceil(math.log10(floor)), math.floor(math.log10(greatest * 2))
    every = max(1, (last - first) // 4)
    return [10.0**power for power in range(first, last + 1, every)]


def bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Groups of bars, each behind its name, with its value as text.

    Args:
        title: what stands above.
        groups: name of a group -> name, length and text of each bar. Bars of one name have one colour.
    """
    width = _BARS
    longest = (
        max((length for _, group in groups for _, length, _ in group if math.isfinite(length)), default=1.0) or 1.0
    )
    names = list(dict.fromkeys(name for _, group in groups for name, *_ in group))
    left, high = 130.0, 17.0
    y, parts = 24.0, [text(0, 13, title, 12, "start")]
    for group_name, group in groups:
        parts.append(text(0, y + 12, group_name, 12, "start"))
        y += high
        for name, length, words in group:
            if is_long := _LETTER * len(name) > left - 8:  # it stands above its bar
                parts.append(text(0, y + 12, name, 11, "start", dim=True))
                y += high
            long = (width - left - 70) * (length / longest if math.isfinite(length) else 1.0)
            parts.append(text(left - 8, y + 12, "" if is_long else name, 11, "end", dim=True))
            parts.append(box(left, y + 2, max(1.0, long), high - 5, colour(names.index(name)), 0.7))
            parts.append(text(left + long + 6, y + 12, words, 11, "start"))
            y += high
        y += 8
    return picture(width, y, parts, title)
