"""The examples in the docstrings of boxing run, and each algorithm has one."""

import doctest
import importlib
from pathlib import Path

import pytest

import keras_flow.boxing

#: modules without an algorithm of their own
WITHOUT = {"__init__", "describe", "drawing", "picture"}
NAMES = sorted(path.stem for path in Path(keras_flow.boxing.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT))
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"keras_flow.boxing.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
