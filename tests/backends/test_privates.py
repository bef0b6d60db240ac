"""What engines have in private is used where it is listed, with a reason."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPS = {"jax": ("jax", "jaxlib"), "tensorflow": ("tensorflow",), "torch": ("torch",)}


def is_private(name: str) -> bool:
    return "tensorflow.python." in name or any(
        part.startswith("_") and not part.startswith("__") for part in name.split(".")
    )


def names(path: Path, tops: tuple[str, ...]) -> Iterator[str]:
    """The dotted names of an engine that a file imports or asks for."""
    tree, known = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in tops:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in tops:
                    top = alias.name.partition(".")[0]
                    known[alias.asname or top] = alias.name if alias.asname else top
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *parts])


@pytest.mark.parametrize("engine", TOPS)
def test_every_private_name_that_is_used_is_listed_and_the_others_are_not(engine: str) -> None:
    file = ROOT / "backends" / engine / "privates.py"  # the package would load the engine
    table = runpy.run_path(str(file))["privates"]()
    listed = {f"{each.module}.{each.name}" for each in table}
    used = {
        name
        for path in sorted((ROOT / "backends" / engine).rglob("*.py"))
        for name in names(path, TOPS[engine])
        if is_private(name)
    }
    # a listed module or table is asked for what is in it; a package is imported on the way to it
    unlisted = {
        name
        for name in used
        if not any(f"{name}.".startswith(f"{each}.") or f"{each}.".startswith(f"{name}.") for each in listed)
    }
    assert unlisted == set()
    assert {each for each in listed if not any(f"{name}.".startswith(f"{each}.") for name in used)} == set()
