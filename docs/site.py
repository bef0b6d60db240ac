"""`make docs`: puts the documentation site together in build/site-source and builds it in build/site, strictly.

Pages are those of docs/; the notebooks are executed, so that the site shows what they show; the reference is made of
the docstrings of public names (docs/reference.py). Links that leave docs/ become plain text, because their targets are
no pages.

    python docs/site.py                 # executes the notebooks on JAX (some minutes)
    python docs/site.py --no-execute    # shows them without outputs
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import reference
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "site-source"
#: what a widget is shown by; it needs the kernel
_WIDGET = "application/vnd.jupyter.widget-view+json"
#: what docs/index.md links to in the repository -> the page that is made of it
_MADE = {"../notebooks/": "notebooks/"}
#: a public name, a how-to and an error's text, which the site's search must find
_FOUND = ("kf.DataParallel", "gradient accumulation", "matched no variable")
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]*|[^):]+/)\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-execute", action="store_true")
    arguments = parser.parse_args()
    for old in (SOURCE, ROOT / ".cache"):  # mkdocs-jupyter remembers pages there
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("*.py", "__pycache__", "adr"))
    shutil.copy(ROOT / "CHANGELOG.md", SOURCE / "changelog.md")
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    # an anchor by the file's name, which links to it have
    texts = [
        f'<a id="{path.stem}"></a>\n\n' + re.sub(r"^#", "##", path.read_text(), flags=re.MULTILINE)
        for path in decisions
    ]
    (SOURCE / "adr.md").write_text("# Decisions\n\n" + "\n".join(texts))
    (SOURCE / "reference").mkdir()
    for name, text in reference.pages().items():
        (SOURCE / "reference" / name).write_text(text)
    (SOURCE / "notebooks").mkdir()
    books = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for number, path in enumerate(books, 1):
        if not arguments.no_execute:
            print(f"notebook {number} of {len(books)}: {path.stem}, run on JAX", flush=True)
        notebook(path, SOURCE / "notebooks" / path.name, not arguments.no_execute)
    for page in SOURCE.rglob("*.md"):
        page.write_text(_links(page, page.read_text()))
    print("pages: mkdocs, most of a minute", flush=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    index = (ROOT / "build" / "site" / "search" / "search_index.json").read_text().lower()
    if missing := [words for words in _FOUND if words.lower() not in index]:
        raise SystemExit(f"the site's search does not find {missing}")
    # a browser lets no page of a file start the worker that searches
    print(f"site: python -m http.server --directory {ROOT / 'build' / 'site'}")


def notebook(source: Path, target: Path, execute: bool) -> None:
    """Copy a notebook, with its outputs."""
    book = nbformat.read(source, as_version=4)
    if execute:
        os.environ.setdefault("KERAS_BACKEND", "jax")
        resources = {"metadata": {"path": target.parent}}
        NotebookClient(book, timeout=600, kernel_name="python3", resources=resources).execute()
        for cell in book.cells:  # progress, which is a widget of a kernel that has ended
            if cell.cell_type == "code":
                cell.outputs = [shown for shown in cell.outputs if _WIDGET not in shown.get("data", {})]
        for left in (*target.parent.glob("*.py"), target.parent / "compare-out"):  # what its cells have written
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    nbformat.write(book, target)


def _links(page: Path, text: str) -> str:
    """Links lead to the site's own pages; those to what is no page of it become plain text."""
    for ours, made in _MADE.items():
        text = text.replace(f"]({ours}", f"]({made}")
    text = re.sub(r"\badr/([\w-]+)\.md\)", r"adr.md#\1)", text)

    def plain(match: re.Match[str]) -> str:
        target = (page.parent / match[2].partition("#")[0]).resolve()
        return match[0] if target.is_file() and target.is_relative_to(SOURCE) else f"{match[1]} (`{match[2]}`)"

    return _LINK.sub(plain, text)


if __name__ == "__main__":
    main()
