"""The notebooks run from top to bottom on every engine; their cells assert what they say.

`make test` runs one on one engine, with each day the next; `make test-full` all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from keras_flow.backends.engines import that_train
from tests import sampling

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def _runs() -> list[object]:
    """One engine a day, with one notebook, which changes when all engines have had theirs."""
    runs: list[object] = []
    turn = sampling.ordinal() // len(that_train())
    for number, backend in enumerate(that_train()):
        today = NOTEBOOKS[(2 * number + turn) % len(NOTEBOOKS)]
        for name in NOTEBOOKS:
            is_run = name == today and sampling.is_of_today(number, len(that_train()))
            marks = [] if is_run else pytest.mark.full
            runs.append(pytest.param(name, backend, marks=marks, id=f"{name}-{backend}"))
    return runs


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("name", "backend"), _runs())
def test_notebook_runs(name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("KERAS_FLOW_BACKENDS", backend)  # of the comparison: the others are run by its own tests
    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_committed_without_outputs_and_lead_to_each_other(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert 'os.environ.setdefault("KERAS_BACKEND"' in code[0].source, "one that is set already wins"
    assert any("assert" in cell.source or "testing" in cell.source for cell in code)
    following = NOTEBOOKS[NOTEBOOKS.index(name) + 1 :][:1]
    assert all(f"({other}.ipynb)" in notebook.cells[-1].source for other in following)


def test_there_are_six() -> None:
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]
