"""The documents speak of files that are there, and docs/design.md draws the house that is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
SOURCES = sorted(path for tree in ("keras_flow", "backends", "tests") for path in (ROOT / tree).rglob("*.py"))
#: a path in backticks: it ends with a slash or a file's ending, or begins with a folder of the repository
_PATH = re.compile(r"`((?:keras_flow|backends|tests|docs|examples|benchmarks|notebooks)/[\w/.*-]*)`")
_HOUSE = re.compile(r"## The house\n.*?```\n(.*?)```", re.DOTALL)


#: how a docstring begins that completes a sentence which stands elsewhere
_FRAGMENT = re.compile(r"(Of|By|As|At|On|The same|In another|One after the other|Where)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_are_named_are_there(page: Path) -> None:
    named = set(_PATH.findall(page.read_text()))
    assert [path for path in sorted(named) if not list(ROOT.glob(path.rstrip("/")))] == []


def test_paths_that_the_sources_name_are_there() -> None:
    named = {(path, name) for path in SOURCES for name in _PATH.findall(path.read_text())}
    assert len(named) > 20
    missing = [(path, name) for path, name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert missing == []


def test_docstrings_can_be_read_where_they_stand() -> None:
    """An editor shows a docstring alone: it has a subject or a verb, and no sentence of another one goes on in it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in SOURCES
        if "tests" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and _FRAGMENT.match(text)
    ]
    assert found == []


def test_tests_are_where_their_sources_are() -> None:
    """A folder of tests has the name of a folder of sources, or CONTRIBUTING says what it tests."""
    said = (ROOT / "CONTRIBUTING.md").read_text()
    for folder in (path for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()):
        mirrors = (ROOT / "keras_flow" / folder.name).is_dir() or folder.name == "backends"
        assert mirrors or f"`tests/{folder.name}`" in said, folder.name


def test_the_house_is_drawn_as_it_is() -> None:
    """Each folder under keras_flow/ and backends/ has its place in the drawing, and no other."""
    drawing = _HOUSE.search((ROOT / "docs" / "design.md").read_text())
    assert drawing is not None
    named = set(re.findall(r"(\w+)/(?=[\s/]|$)", drawing[1]))
    folders = {
        folder.name
        for tree in ("keras_flow", "backends")
        for folder in [ROOT / tree, *(ROOT / tree).iterdir()]
        if folder.is_dir() and (folder / "__init__.py").exists()
    }
    assert named == folders
    files = re.findall(r"\b(\w+\.py)\b", drawing[1])
    assert files
    assert [file for file in files if not list(ROOT.glob(f"*/{file}"))] == []


_ROW = re.compile(r"^\| ([a-z][^|]*) \| ([^|]*`[^|]*) \| ([^|]*) \|$", re.MULTILINE)
ERRANDS = _ROW.findall((ROOT / "CONTRIBUTING.md").read_text())


def defined_in(path: Path) -> set[str]:
    """Functions, classes, methods and assigned names of a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_there_are_ten_errands() -> None:
    assert len(ERRANDS) >= 10


@pytest.mark.parametrize(("errand", "files", "names"), ERRANDS, ids=[errand for errand, _, _ in ERRANDS])
def test_an_errand_leads_to_files_that_define_the_names(errand: str, files: str, names: str) -> None:
    paths = [ROOT / path for path in re.findall(r"`([\w/.-]+)`", files)]
    assert paths and [path for path in paths if not path.exists()] == []
    defined = set().union(*(defined_in(path) for path in paths if path.suffix == ".py"))
    assert set(re.findall(r"`(\w+)`", names)) <= defined


def test_links_lead_to_files_of_the_repository() -> None:
    pages = [*PAGES, ROOT / "examples" / "README.md"]
    targets = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())]
    assert targets
    assert [(page.name, link) for page, link in targets if not (page.parent / link).exists()] == []


_WORD = re.compile(r"`(\w+(?:\.\w+)*)(?:\([^`]*\))?`")


def test_names_in_the_design_are_those_of_the_sources() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    words = set(re.findall(r"\w+", text)) | {path.name for path in SOURCES} | {path.stem for path in SOURCES}
    named = set(_WORD.findall((ROOT / "docs" / "design.md").read_text()))
    assert named
    assert {name for name in named if name not in words and not set(name.split(".")) <= words} == set()


#: how module-level state is made
_MADE = (
    "ContextVar(",
    "Counter(",
    "WeakKeyDictionary(",
    "WeakSet(",
    "WeakValueDictionary(",
    "threading.local(",
    "deque(",
    "{}",
    "[]",
    "set()",
)


def _state(path: Path) -> Iterator[str]:
    """Module-level names that functions change: assigned under `global`, or made as an empty or a weak container."""
    tree = ast.parse(path.read_text())
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else ():
            value = ast.unparse(node.value) if node.value is not None else ""  # type: ignore[attr-defined]
            if isinstance(target, ast.Name) and (target.id in changed or value.startswith(_MADE)):
                yield target.id


def test_all_global_state_is_listed() -> None:
    page = (ROOT / "docs" / "global-state.md").read_text()
    rows = re.findall(r"^\| (`\w+/[^|]*)\|", page, re.MULTILINE)
    listed = {(row.split("`")[1], name) for row in rows for name in row.split("`")[3::2]}
    files = [path for tree in ("keras_flow", "backends") for path in (ROOT / tree).rglob("*.py")]
    assert listed == {(str(path.relative_to(ROOT)), name) for path in files for name in _state(path)}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_context_variables_stand_apart() -> None:
    """What holds for a `with` block is a context variable, and stands under that heading; all else holds for longer."""
    page = (ROOT / "docs" / "global-state.md").read_text()
    section = page.split("## As long as a `with` block")[1].split("\n## ")[0]
    listed = {
        (row.split("`")[1], name)
        for row in re.findall(r"^\| (`\w+/[^|]*)\|", section, re.MULTILINE)
        for name in row.split("`")[3::2]
    }
    made = set()
    for path in (path for tree in ("keras_flow", "backends") for path in (ROOT / tree).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node.value or node).startswith(
                "ContextVar("
            ):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                made.add((str(path.relative_to(ROOT)), ast.unparse(target)))
    assert listed == made
