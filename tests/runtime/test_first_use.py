"""Lines that may have initialised an engine, as they are found in the cells of a notebook."""

from __future__ import annotations

import linecache
import sys

import keras
import numpy as np
import pytest

from keras_flow.current import first_use

CELLS = """
first = keras.config.backend()
x = np.ones(3)
def inner():
    return keras.ops.ones(4)
if True:
    y = keras.ops.ones(3)
z = later()
"""


@pytest.fixture(autouse=True)
def nothing_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_found_first", {})


def later() -> object:
    return keras.layers.Dense(3)


def test_lines_of_cells_that_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "In", ["", "x = 1", CELLS, "kf.init(4)"], raising=False)
    for name, value in {"keras": keras, "np": np, "later": later}.items():
        monkeypatch.setattr(main, name, value, raising=False)
    found = {place: line for place, line in first_use.first_uses("jax").items() if place.startswith("cell ")}
    assert found == {"cell 2, line 7": "y = keras.ops.ones(3)", "cell 2, line 8": "z = later()"}
    # the call that came too late is a use itself, and stands in a cell when it is made again
    monkeypatch.setattr(main, "In", ["", "x = 1", CELLS, "keras.ops.ones(5)", "kf.init(4)"])
    assert not [place for place in first_use.first_uses("jax") if place.startswith("cell 3")]


def test_a_line_that_the_engine_names_has_the_number_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "/tmp/ipykernel_1/2.py"
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", "x = 1", "a = 1\nb = 2", "kf.init(4)"], raising=False)
    monkeypatch.setitem(linecache.cache, file, (0, None, ["a = 1\n", "b = 2\n"], file))
    assert first_use.line_of(file, 2) == {"cell 2, line 2": "b = 2"}


def test_the_text_names_three_at_most() -> None:
    lines = {f"train.py, line {k}": "x" for k in range(5)}
    assert first_use.in_words(lines).count("train.py") == 3
    assert first_use.in_words({}) == ""
