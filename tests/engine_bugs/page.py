"""docs/engine-bugs.md, from the docstrings of the reproductions; reads them as text, so that no engine is loaded.

python -m tests.engine_bugs.page      writes the page
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from keras_flow.compare.known_differences import KNOWN

ENGINES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "engine-bugs.md"

_HEAD = """# Bugs of the engines that keras_flow works around

`tests/engine_bugs/` reproduces each bug in a few lines of the plain engine. Its test fails when the engine has fixed
the bug. The code that works around it can then be dropped. `python -m tests.engine_bugs.page` writes this page.
"""

_KNOWN = """
## Engines that differ on one device

They show without keras_flow. A distribution has the numbers of one device of its engine, so it keeps them.
`keras-flow compare` names those that fit a program (`keras_flow/compare/known_differences.py`).
"""


def bugs(engine: str) -> dict[str, str]:
    """Name of each reproduction of an engine -> its docstring; none where there is no file."""
    path = FOLDER / f"{engine}.py"
    if not path.exists():
        return {}
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    found = {node.name: ast.get_docstring(node) or "" for node in functions if not node.name.startswith("_")}
    return {name: text for name, text in found.items() if "Instead:" in text}


def reproductions(engine: str) -> list[str]:
    """Names of all reproductions of an engine: of its bugs, and of the ways in which it differs from other engines."""
    return [*bugs(engine), *(each.reproduction for each in KNOWN if each.reproduction and engine in each.engines)]


def seen_in(engine: str) -> str:
    """The versions that an engine's file names."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{engine}.py").read_text())) or ""
    match = re.search(r"Seen in (.*?)\.\n", text + "\n", re.DOTALL)
    assert match, f"{engine}.py does not say in which versions its bugs were seen"
    return " ".join(match[1].split())


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for engine, title in ENGINES.items():
        own = bugs(engine)
        if not own:
            continue
        parts.append(f"\n## {title}\n\nSeen in {seen_in(engine)}.\n")
        for name, text in own.items():
            what, _, instead = (" ".join(part.split()) for part in text.partition("Instead:"))
            parts.append(f"\n- {what}\n  *Instead:* {instead}\n  (`{name}`)\n")
    parts.append(_KNOWN)
    for known in KNOWN:
        shown = f"  (`{known.reproduction}`)\n" if known.reproduction else ""
        parts.append(f"\n- **{known.name}**: {known.what}\n  *Instead:* {known.advice}\n{shown}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {sum(len(bugs(engine)) for engine in ENGINES)} bugs")
