"""The notebooks run from top to bottom on every engine; their cells assert what they say.

`make test` runs one on one engine; `make test-full` all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from keras_flow.backends.engines import that_train
from tests.sampling import chosen

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def _runs() -> list[object]:
    pairs = [(name, backend) for name in NOTEBOOKS for backend in that_train()]
    run = chosen("the notebook that is run", pairs)
    return [pytest.param(*pair, marks=[] if pair == run else pytest.mark.full, id="-".join(pair)) for pair in pairs]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("name", "backend"), _runs())
def test_notebook_runs(name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("NOTEBOOK_BACKENDS", backend)  # of the comparison; tests/compare/test_end_to_end.py compares engines
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


def test_they_are_numbered() -> None:
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]
