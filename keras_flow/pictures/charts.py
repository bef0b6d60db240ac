"""Curves over steps and bars, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_flow.pictures.svg import box, colour, line, picture, text

_DASH = 9.0
_LEFT, _TOP, _BOTTOM = 58.0, 30.0, 30.0
#: width and height of curves, in pixels
_CURVES = 340.0, 230.0
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
    width, height = _CURVES
    values = [value for curve in drawn for value in curve.values if math.isfinite(value)]
    least, greatest = bounds or (0.0, max([*values, *limit], default=1.0))
    if greatest <= least:  # a loss that never changes, or none that can be drawn
        greatest = least + (abs(least) or 1.0)
    steps = max(max((len(curve.values) for curve in drawn), default=2) - 1, 1)
    base, right = height - _BOTTOM, width - 10

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

    parts = [text(_LEFT, 13, title, 12, "start")]
    for level in _levels(least, greatest, floor):
        parts.append(f"<g opacity='.25'>{line(_LEFT, y_of(level), right, y_of(level))}</g>")
        words = f"{level:.3g}" if floor is None else f"{'≤' * (level < 1.5 * floor)}{level:.0e}"
        parts.append(text(_LEFT - 6, y_of(level) + 4, words, 10, "end", dim=True))
    if limit:
        parts.append(
            f"<polyline points='{points(limit)}' fill='none' stroke='#d33' stroke-width='1.5' stroke-dasharray='2 3'/>"
        )
        parts.append(text(_LEFT + 4, y_of(limit[0]) - 6, "tolerance", 10, "start"))
    for number, curve in enumerate(drawn):
        dashes = f"{_DASH:g} {_DASH * (len(drawn) - 1):g}" if len(drawn) > 1 else "none"
        # thin and faint below: a curve that lies alone is seen as a line and not only as dashes
        for width_of, opacity, dash in ((1.0, 0.5, "none"), (2.6, 1.0, dashes)):
            parts.append(
                f"<polyline points='{points(curve.values)}' fill='none' stroke='{colour(curve.number)}' "
                f"stroke-width='{width_of}' stroke-opacity='{opacity}' stroke-dasharray='{dash}' "
                f"stroke-dashoffset='{0 - _DASH * number:g}' stroke-linejoin='round'>"
                f"</polyline>"
            )
    parts.append(text(right, height - 10, f"step {steps + 1}", 10, "end", dim=True))
    x = _LEFT
    for curve in drawn:
        parts.append(f"<rect x='{x:.0f}' y='{height - 16:.0f}' width='12' height='5' fill='{colour(curve.number)}'/>")
        parts.append(text(x + 16, height - 10, curve.name, 10.5, "start"))
        x += 26 + 6.2 * len(curve.name)
    return picture(width, height, parts, title)


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
        for name, length, words in group:
            long = (width - left - 70) * (length / longest if math.isfinite(length) else 1.0)
            parts.append(text(left - 8, y + 12, name, 11, "end", dim=True))
            parts.append(box(left, y + 2, max(1.0, long), high - 5, colour(names.index(name)), 0.7))
            parts.append(text(left + long + 6, y + 12, words, 11, "start"))
            y += high
        y += 8
    return picture(width, y, parts, title)
