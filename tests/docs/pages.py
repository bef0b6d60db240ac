"""What a page promises: its programs, files, commands, and the output that it shows.

```python title="train.py"    a file, for the commands that follow
```python                     a program; a block that does not import keras_flow goes on with the one before
```sh                         commands, run by bash one after the other
```text                       what the block before it prints; `...` stands for anything
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OUTSIDE = ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")
PAGES = (*(ROOT / name for name in _OUTSIDE), *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY = re.compile(r"KERAS_BACKEND=jax( .*) # or torch, tensorflow$")
_TITLE = re.compile(r'title="([^"]+)"')
_IMPORTS = re.compile(r"^\s*(?:import|from) .*\bkeras_flow\b", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One thing to do: write a file, run a program or run commands.

    Args:
        kind: "file", "program" or "commands".
        text: the file, the program, or the commands.
        line: the line of the page at which it begins.
        name: of the file.
        shown: what the page shows of its output, in order.
        cells: the blocks of a program.
    """

    kind: str
    text: str
    line: int
    name: str = ""
    shown: tuple[str, ...] = field(default=())
    cells: tuple[str, ...] = field(default=())


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str, str, int]]:
    """Language, title, text and line of each fenced block."""
    text = page.read_text()
    return [
        (
            found["language"],
            (_TITLE.findall(found["options"]) or [""])[0],
            found["text"],
            text[: found.start()].count("\n") + 1,
        )
        for found in _FENCE.finditer(text)
    ]


def steps(page: Path) -> list[Step]:
    """What the page tells its reader to do, in order."""
    done: list[Step] = []
    program = -1  # the index of the program that a block may go on with
    for language, title, text, line in blocks(page):
        if language == "python" and title:
            done.append(Step("file", text, line, title))
        elif language == "python" and (program < 0 or (_IMPORTS.search(text) and not text.startswith("%%"))):
            program = len(done)
            done.append(Step("program", text, line, cells=(text,)))
        elif language == "python":
            before = done[program]
            done[program] = replace(before, text=f"{before.text}\n{text}", cells=(*before.cells, text))
            done.append(done.pop(program))
            program = len(done) - 1
        elif language == "sh":
            done.append(Step("commands", text, line))
        elif language == "text":
            done[-1] = replace(done[-1], shown=(*done[-1].shown, text))
    return done


def commands(text: str, engine: str = "jax") -> list[str]:
    """The commands of a block: lines without comments, those that end in a backslash joined.

    A line whose comment says that other engines print the same names this one.
    """
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    lines = [_ANY.sub(rf"KERAS_BACKEND={engine}\1", line) for line in lines]
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def matches(shown: str, printed: str) -> bool:
    """Whether what is shown is somewhere in the output: blanks count alike, and `...` stands for anything."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in shown.split("..."))
    return re.search(r".*?".join(rf"\s*{part}\s*" for part in parts), printed, re.DOTALL) is not None
