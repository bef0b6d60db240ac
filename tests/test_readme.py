"""The program of the README, as it stands there: it trains on every backend and prints no warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import programs
from tests.sampling import on_one

README = Path(__file__).parents[1] / "README.md"
#: what the program leaves to the reader
GIVEN = """
import numpy as np

random = np.random.default_rng(0)
x, y = random.normal(size=(1000, 64)).astype("float32"), random.integers(0, 10, 1000)
x_test, y_test = x[:250], y[:250]


def build_model():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((64,)), layers.Dense(128, "relu", name="hidden"), layers.Dense(10, "softmax", name="logits")]
    )

"""


def program() -> str:
    """The code under "A program"."""
    section = README.read_text().split("## A program")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    imports, _, body = code[1].partition("\n\n")
    assert imports == "import keras, keras_flow as kf"
    return imports + GIVEN + body


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", on_one(("jax", "tensorflow", "torch")))
def test_the_program_trains_and_warns_of_nothing(tmp_path: Path, backend: str) -> None:
    script = programs.write(tmp_path, program().replace("m.keras", str(tmp_path / "m.keras")))
    code, out, err = programs.finish(programs.start([str(script)], backend), 190)
    assert code == 0, err
    losses = [float(found) for found in re.findall(r"val_loss: ([0-9.]+)", out)]
    assert losses
    assert 1 < losses[-1] < 4
    assert (tmp_path / "m.keras").stat().st_size > 10_000
    assert not re.findall(r".*(?:[Ww]arning:|WARNING:(?!\s*All log)).*", err), err
