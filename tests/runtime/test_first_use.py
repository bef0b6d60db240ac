"""Lines that may have initialised an engine, as they are found in the cells of a notebook."""

from __future__ import annotations

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


def later() -> object:
    return keras.layers.Dense(3)


def test_lines_of_cells_that_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "In", ["", "x = 1", CELLS, "kf.init(4)"], raising=False)
    for name, value in {"keras": keras, "np": np, "later": later}.items():
        monkeypatch.setattr(main, name, value, raising=False)
    found = {place: line for place, line in first_use.first_uses("jax").items() if place.startswith("cell ")}
    assert found == {"cell 2, line 7": "y = keras.ops.ones(3)", "cell 2, line 8": "z = later()"}


def test_the_text_names_three_at_most() -> None:
    lines = {f"train.py, line {k}": "x" for k in range(5)}
    assert first_use.in_words(lines).count("train.py") == 3
    assert first_use.in_words({}) == ""
