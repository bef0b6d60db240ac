"""Every public name of keras_flow has an example in its docstring, and all examples run.

Those of boxing have a test of their own, which asks for one in each module.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import keras_flow as kf
from tests.launch import programs

ROOT = Path(kf.__file__).parent
#: folders whose examples need ranks that train
TRAIN = ("current", "distributions", "explainer", "launch", "notebook", "parallel", "runtime", "timeline")


def modules_with_examples() -> list[str]:
    """Modules of keras_flow, the engines and boxing left out, with an example in a docstring."""
    names = [
        ".".join(("keras_flow", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(ROOT.rglob("*.py"))
        if ">>> " in path.read_text()
    ]
    return [name for name in names if not name.startswith(("keras_flow.backends", "keras_flow.boxing."))]


#: folders whose examples are those of a process that is one rank
ALONE = ("hvd", "compat")


def on(name: str) -> str:
    """The engine on whose ranks the examples of a module run; nothing for those that need no ranks."""
    folder = name.split(".")[1]
    if folder in TRAIN or name.endswith("from_engine"):
        return "jax"
    return "numpy" if folder == "tensors" else ""


def run_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("backend", "name"), [(on(name), name) for name in modules_with_examples()], ids=modules_with_examples()
)
def test_examples_run(backend: str, name: str, on_ranks: Callable) -> None:
    if name.split(".")[1] in ALONE:
        code = f"from tests.test_doctests import run_examples; run_examples({name!r})"
        status, _, err = programs.finish(programs.start(["-c", code], "jax", PYTHONPATH=str(ROOT.parent)), 200)
        assert status == 0, err
    elif backend:
        on_ranks(backend)(run_examples, name)
    else:
        run_examples(name)


@pytest.mark.parametrize("name", [name for name in kf.__all__ if name != "__version__"])
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(kf, name)) or "")
