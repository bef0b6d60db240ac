"""The notebooks run from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=150, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
