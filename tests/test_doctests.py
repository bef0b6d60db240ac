"""The examples in the docstrings of keras_flow run. Those of the algebra and of boxing have tests of their own."""

import doctest
import importlib
from pathlib import Path

import pytest

import keras_flow

ROOT = Path(keras_flow.__file__).parent
ELSEWHERE = ("backends", "boxing", "tensors")
NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in ELSEWHERE and ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"keras_flow.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
