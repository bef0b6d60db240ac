"""A job whose program forgot the scope says so: each process would train a copy of its own, and losses look right."""

from pathlib import Path

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

PROGRAM = """\
import keras_flow as kf
import keras
import numpy as np

kf.init()
x, y = np.ones((8, 4)), np.ones((8, 2))
for make_inside in (True, False, False):
    layers = [keras.Input((4,)), keras.layers.Dense(2)]
    if make_inside:
        with kf.DataParallel().scope():
            model = keras.Sequential(layers, name="inside")
            model.compile("sgd", "mse")
    else:
        model = keras.Sequential(layers, name="forgotten")
        model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
"""


@pytest.mark.parametrize(
    ("backend", "who"),
    [("torch", "each of 2 processes trains a copy of its own"), ("jax", "one rank trains")],
)
def test_a_forgotten_scope_is_told_once(backend: str, who: str, tmp_path: Path) -> None:
    code, _, err = programs.launch(programs.write(tmp_path, PROGRAM), ranks=2, backend=backend)
    assert code == 0, err
    assert err.count("outside of every distribution") == 1, err
    assert f"model 'forgotten' is trained outside of every distribution, in a job of 2 ranks: {who}" in err
