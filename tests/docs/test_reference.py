"""The reference names what `kf` has, each name on one page."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

import keras_flow
from tests.docs.pages import ROOT

pytestmark = pytest.mark.check


def _reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_one_page() -> None:
    reference = _reference()
    named = [name for group in reference.GROUPS.values() for name in reference.names(group)]
    assert len(named) == len(set(named))
    assert {name for name in named if "." not in name} == set(keras_flow._NAMES)
    modules = {group.module for group in reference.GROUPS.values() if group.module}
    assert modules == set(keras_flow._MODULES) - {"ops"}
    assert {"env.is_main_process", "comm.all_reduce", "boxing.execute", "notebook.compare"} <= set(named)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [f"reference/{name}" for name in _reference().pages()]
    pages += [
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "adr"
    ]
    assert [page for page in pages if not re.search(rf"- (\w+: )?{re.escape(page)}$", navigation, re.MULTILINE)] == []


def test_sessions_and_pages_of_docstrings() -> None:
    griffe = pytest.importorskip("griffe", reason="comes with `make docs`")
    spec = importlib.util.spec_from_file_location("griffe_docstrings", ROOT / "docs" / "griffe_docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "Line.\n\nMore: docs/memory.md, `docs/howto/own_loop.md`.\n\nExample:\n    >>> 1 + 1\n    2\n"
    function = griffe.Function("f", docstring=griffe.Docstring(text))
    module.Docstrings().on_instance(obj=function)
    parts = function.docstring.parse("google")
    assert [part.kind.value for part in parts] == ["text", "examples"]
    assert parts[0].value == "Line.\n\nMore: [memory](../memory.md), [own loop](../howto/own_loop.md)."
