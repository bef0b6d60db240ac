"""One meaning for each class name in `keras_flow/` and `backends/`: a reader who greps a name finds one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: class names that stand for the same thing in several files -> why they are no two meanings
SHARED: dict[str, str] = {}


def classes() -> dict[str, list[str]]:
    """Name, without leading underscores -> the places where a class of that name is defined."""
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("keras_flow", "backends"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (ROOT / "keras_flow" / "backends") in path.parents:  # the link by which editors find backends/
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return places


def test_no_class_name_has_two_meanings() -> None:
    defined = classes()
    assert len(defined) > 100
    assert {name: places for name, places in defined.items() if len(places) > 1 and name not in SHARED} == {}


def test_each_exception_is_needed() -> None:
    defined = classes()
    assert [name for name in SHARED if len(defined[name]) < 2] == []
