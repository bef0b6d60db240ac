"""Colours, and the few shapes that pictures consist of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

#: after Okabe and Ito, told apart by people with any kind of colour vision; the blue is lighter, for dark pages
_COLOURS = ("#2f86c9", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7ae6", "#9a8f00")
FONT = "font-family='system-ui,sans-serif'"
#: the colour of what communicates
TRAFFIC = "#d55e00"
#: pixels between pictures that stand side by side
_GAP = 24.0
#: of a `picture`
_SIZE = re.compile(r"viewBox='0 0 (\d+) (\d+)' width='\d+' style='[^']*'")


def colour(rank: int) -> str:
    """The colour of a rank, or of the number of a curve.

    Example:
        >>> colour(0), colour(8) == colour(0)
        ('#2f86c9', True)
    """
    return _COLOURS[rank % len(_COLOURS)]


def box(
    x: float, y: float, width: float, height: float, fill: str = "none", opacity: float = 0.45, note: str = ""
) -> str:
    """A rectangle with an outline in the page's colour; `note` is shown under the mouse."""
    title = f"<title>{escape(note)}</title>" if note else ""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='2' fill='{fill}' "
        f"fill-opacity='{opacity:g}' stroke='currentColor' stroke-opacity='.55'>{title}</rect>"
    )


def text(x: float, y: float, words: str, size: float = 12, anchor: str = "middle", dim: bool = False) -> str:
    """A line of text, its middle (or `start`, `end`) at x, its base at y."""
    opacity = " fill-opacity='.65'" if dim else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' text-anchor='{anchor}' fill='currentColor'"
        f"{opacity} {FONT}>{escape(words)}</text>"
    )


def line(
    x1: float, y1: float, x2: float, y2: float, stroke: str = "currentColor", width: float = 1, dash: str = ""
) -> str:
    """A line."""
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{stroke}' stroke-width='{width:g}'{dashes}/>"


def arrow(x1: float, y1: float, x2: float, y2: float, width: float, note: str = "") -> str:
    """A bent line from one point down to another, with a head."""
    middle, head = (y1 + y2) / 2, 3 + width
    title = f"<title>{escape(note)}</title>" if note else ""
    return (
        f"<g>{title}<path d='M{x1:.1f},{y1:.1f} C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2 - head:.1f}' "
        f"fill='none' stroke='{TRAFFIC}' stroke-width='{width:.1f}' stroke-opacity='.8'/>"
        f"<path d='M{x2 - head * 0.7:.1f},{y2 - head:.1f} L{x2 + head * 0.7:.1f},{y2 - head:.1f} L{x2:.1f},{y2:.1f} Z' "
        f"fill='{TRAFFIC}'/></g>"
    )


def picture(width: float, height: float, parts: Sequence[str], name: str) -> str:
    """An SVG element that stands in a page or in a file; it shrinks with a narrow page."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
        f"style='max-width:100%;height:auto' role='img' aria-label='{escape(name, quote=True)}'>{''.join(parts)}</svg>"
    )


def side_by_side(pictures: Sequence[str], name: str) -> str:
    """Several of these SVG elements as one, for a file."""
    x, heights, parts = 0.0, [0.0], []
    for each in pictures:
        width, height = _SIZE.findall(each)[0]
        parts.append(_SIZE.sub(rf"viewBox='0 0 \1 \2' x='{x:g}' width='\1' height='\2'", each, count=1))
        x, heights = x + float(width) + _GAP, [*heights, float(height)]
    return picture(max(x - _GAP, 0), max(heights), parts, name)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), title: str = "") -> str:
    """An HTML table; `numbers` are the columns whose cells stand at the right."""

    def cell(tag: str, column: int, words: str) -> str:
        side = "right" if column in numbers else "left"
        scope = " scope='col'" if tag == "th" else ""
        return f"<{tag}{scope} style='text-align:{side};padding:.1em .7em;vertical-align:top'>{words}</{tag}>"

    def row(tag: str, words: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, column, escape(word)) for column, word in enumerate(words))}</tr>"

    caption = f"<div style='margin:.6em 0 .2em'><b>{escape(title)}</b></div>" if title else ""
    body = "".join(row("td", words) for words in rows)
    return (
        f"{caption}<div style='overflow-x:auto'><table style='border-collapse:collapse'>{row('th', heads)}{body}"
        "</table></div>"
    )
