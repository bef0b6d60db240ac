"""The examples in the docstrings of signatures run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["call", "table"])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"keras_flow.signatures.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
