"""Every text of docs/howto/errors_by_text.md is still one of the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.check

PAGE = ROOT / "docs" / "howto" / "errors_by_text.md"
TEXTS = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


def _written(node: ast.AST) -> str | None:
    """Return the text of a string of the sources, with `...` for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)  # type: ignore[misc]
    return None


def _sources() -> Iterator[str]:
    for folder in ("keras_flow", "backends"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                text = _written(node)
                if text is not None and len(text) > 8:
                    yield text


STRINGS = tuple(_sources())


def test_there_are_texts() -> None:
    assert len(TEXTS) > 20


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_one_of_the_sources(text: str) -> None:
    pattern = re.compile(".*?".join(re.escape(part.strip()) for part in text.split("...")), re.DOTALL)
    assert any(pattern.search(string) for string in STRINGS)
