"""Every program and command of README, docs and guides is run as it stands, and prints what the page shows.

A page is run from top to bottom in a folder of its own, on each engine. `make test` takes the first pages that a
newcomer reads, `make test-full` all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from keras_flow.backends.engines import that_train
from tests.docs.given import ELSEWHERE, FILES, SLOW
from tests.docs.pages import PAGES, ROOT, Step, blocks, commands, matches, name_of, steps
from tests.launch import programs

#: the pages that `make test` runs, and where
_QUICK = {("README.md", "torch"), ("docs/first_program.md", "jax"), ("docs/howto/is_it_right.md", "tensorflow")}
#: pages whose programs print no warning
_CALM = ("README.md", "docs/first_program.md", "docs/index.md")
_WARNING = re.compile(r".*(?:[Ww]arning:|WARNING:(?!\s*All log)).*")
#: logs, tables that programs write, and what is said of decisions and measurements
_INTERNAL = ("docs/adr/", "docs/boxing-spec", "docs/engine-bugs", "docs/features", "benchmarks/")
_BULLET = re.compile(r"^ *- .*(?:\n(?! *- |\s*$|#).*)*", re.MULTILINE)
#: seconds for one program or one block of commands
_LIMIT = 280
#: what a block without a language must not begin with: commands are marked, so that they are run
_COMMAND = re.compile(r"^(?:keras-flow|python|pip|make|torchrun|mpirun|srun|export) ", re.MULTILINE)


def _runs() -> list[object]:
    """Page, engine, and which commands are left out."""
    pages = [page for page in PAGES if steps(page)]
    quick = [
        pytest.param(page, engine, {**ELSEWHERE, **SLOW}, id=f"{name_of(page)}-{engine}-quick")
        for page in pages
        for engine in that_train()
        if (name_of(page), engine) in _QUICK
    ]
    full = [
        pytest.param(page, engine, ELSEWHERE, marks=pytest.mark.full, id=f"{name_of(page)}-{engine}")
        for page in pages
        for engine in that_train()
    ]
    return [*quick, *full]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("page", "engine", "left_out"), _runs())
def test_a_page_does_what_it_says(page: Path, engine: str, left_out: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for number, step in enumerate(steps(page)):
        if step.kind == "file":
            (tmp_path / step.name).write_text(step.text)
            continue
        printed = _run(step, page, number, engine, left_out, tmp_path)
        for shown in step.shown:
            assert matches(shown, printed), f"{name_of(page)}:{step.line} shows\n{shown}\nand it printed\n{printed}"


def _run(step: Step, page: Path, number: int, engine: str, left_out: Mapping[str, str], folder: Path) -> str:
    """Return what the step prints."""
    where = f"{name_of(page)}:{step.line}, on {engine}"
    if step.kind == "commands":
        lines = [command for command in commands(step.text, engine) if command not in left_out]
        return _printed(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], engine, folder, where)[0]
    if "kf.notebook" in step.text:
        return _in_a_notebook(step.cells, engine, folder)
    script = folder / f"program_{number}.py"
    script.write_text(step.text)
    starts_ranks = "kf.run(" in step.text
    command = [sys.executable, *([] if starts_ranks else ["-m", "keras_flow.launch", "--devices", "4"]), str(script)]
    printed, said = _printed(command, engine, folder, where)
    assert name_of(page) not in _CALM or not _WARNING.findall(said), said
    return printed


def _printed(command: list[str], engine: str, folder: Path, where: str) -> tuple[str, str]:
    """Return the output and the errors of a command, which must be successful."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**programs.ENVIRONMENT, "PATH": path, "KERAS_BACKEND": engine, "COLUMNS": "120"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT)
    assert done.returncode == 0, f"{where}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def _in_a_notebook(cells: tuple[str, ...], engine: str, folder: Path) -> str:
    """Return the texts that cells print and show, run one after the other in a kernel."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**programs.ENVIRONMENT, "KERAS_BACKEND": engine}
    client = NotebookClient(book, timeout=_LIMIT, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute(env=environment)
    outputs = [output for cell in book.cells for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.check
def test_what_is_not_run_here_stands_on_a_page() -> None:
    told = {
        command for page in PAGES for step in steps(page) for command in commands(step.text) if step.kind == "commands"
    }
    assert [command for command in (*ELSEWHERE, *SLOW) if command not in told] == []
    named = {path for reason in ELSEWHERE.values() for path in re.findall(r"tests/[\w/]+\.py", reason)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.check
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_marked(page: Path) -> None:
    """A command in a block that is not marked `sh`, or is only indented, would never be run."""
    assert [text for language, _, text, _ in blocks(page) if not language and _COMMAND.search(text)] == []
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4}(?:keras-flow|python|pip|make) .*", outside, re.MULTILINE) == []


@pytest.mark.check
def test_no_bullet_is_a_paragraph() -> None:
    found = []
    for page in PAGES:
        if not name_of(page).startswith(_INTERNAL):
            text = re.sub(r"^```.*?^```$|\]\([^)]*\)", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
            found += [(name_of(page), bullet) for bullet in _BULLET.findall(text) if len(bullet.split()) > 51]
    assert found == []


@pytest.mark.check
def test_a_guide_shows_the_same_numbers_before_and_after() -> None:
    """Those of libraries that can be installed; `test_a_page_does_what_it_says` finds the numbers in the outputs."""
    guides = (
        "from_ddp",
        "from_fsdp",
        "from_torch_pipelining",
        "from_data_parallel",
        "from_keras_distribution",
        "from_tf_distribute",
    )
    for page in (ROOT / "docs" / "migrate" / f"{guide}.md" for guide in guides):
        shown = {step.text.split()[-1]: step.shown for step in steps(page) if step.shown}
        assert shown["before.py"] == shown["after.py"], page.name


@pytest.mark.check
def test_a_command_for_any_engine_names_the_one_that_is_tested() -> None:
    first = next(step.text for step in steps(ROOT / "README.md") if "first.py" in step.text and step.kind == "commands")
    assert [commands(first, engine) for engine in that_train()] == [
        [f"KERAS_BACKEND={engine} python first.py"] for engine in that_train()
    ]
    assert commands("KERAS_BACKEND=jax python first.py", "torch") == ["KERAS_BACKEND=jax python first.py"]


@pytest.mark.check
def test_what_is_shown_is_found() -> None:
    printed = "epoch 1\nloss 0.25   accuracy 0.5\ndone\n"
    assert matches("loss 0.25 accuracy 0.5", printed)
    assert matches("epoch 1\n...\ndone", printed)
    assert not matches("loss 0.2 accuracy", printed)
    assert not matches("done\nepoch 1", printed)
