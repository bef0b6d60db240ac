"""The examples in the docstrings of keras_flow run. Those of boxing have a test of their own."""

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_flow

ROOT = Path(keras_flow.__file__).parent
#: global tensors: their examples need ranks, which numpy has without a device
TENSORS = """
import doctest, importlib, sys
import keras_flow as kf

kf.init(4)
for name in sys.argv[1:]:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0, name
    assert result.failed == 0, name
"""


def modules_with_examples() -> list[str]:
    """Modules of keras_flow, the engines and boxing left out, with an example in a docstring."""
    names = [
        ".".join(("keras_flow", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(ROOT.rglob("*.py"))
        if ">>> " in path.read_text()
    ]
    return [name for name in names if not name.startswith(("keras_flow.backends", "keras_flow.boxing"))]


NAMES = modules_with_examples()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("keras_flow.tensors")])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.timeout(120)
def test_examples_of_global_tensors() -> None:
    names = [name for name in NAMES if name.startswith("keras_flow.tensors")]
    assert len(names) > 5
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    result = subprocess.run(
        [sys.executable, "-c", TENSORS, *names], env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
