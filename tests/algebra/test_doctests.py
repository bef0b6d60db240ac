"""The examples in the docstrings of the algebra run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["sbp", "placements", "layout", "errors"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"keras_flow.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
