"""Writes the pictures of docs/concepts.md: `python docs/pictures.py`."""

from __future__ import annotations

import re
from pathlib import Path

import keras_flow as kf

FILE = Path(__file__).with_name("layouts.svg")
MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
#: of one matrix [4, 8], and what it is an example of
LAYOUTS = {"B,B": "whole on each rank", "S(0),B": "rows over data", "B,S(1)": "columns over model", "S(0),S(1)": "both"}
_PICTURE = re.compile(r"<svg[^>]*viewBox='0 0 (\d+) (\d+)'[^>]*>(.*)</svg>", re.DOTALL)


def picture() -> str:
    """Return the four layouts, one beside the other."""
    parts, left, height = [], 0, 0
    for nd_sbp, meaning in LAYOUTS.items():
        found = _PICTURE.search(kf.visualize(kf.Layout(MESH, nd_sbp, (4, 8)))._repr_html_())
        assert found is not None
        text = (
            f"<text x='4' y='{int(found[2]) + 14}' font-size='12' font-family='system-ui,sans-serif'>{meaning}</text>"
        )
        parts.append(f"<g transform='translate({left},0)'>{found[3]}{text}</g>")
        left, height = left + int(found[1]) + 12, max(height, int(found[2]) + 22)
    size = f"viewBox='0 0 {left} {height}' width='{left}' height='{height}'"
    ground = "<rect width='100%' height='100%' fill='white'/>"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} color='black'>{ground}{''.join(parts)}</svg>\n"


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
