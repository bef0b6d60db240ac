"""The pictures of the pages are those that the code draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_layouts_are_drawn_as_the_code_draws_them() -> None:
    spec = importlib.util.spec_from_file_location("pictures_of_docs", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert pictures.FILE.read_text() == pictures.picture()
