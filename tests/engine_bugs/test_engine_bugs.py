"""The bugs of the engines are still there; one that is mended says which workaround to drop."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engine_bugs.page import ENGINES, PAGE, page, reproductions

pytestmark = pytest.mark.timeout(400)


@functools.cache
def _found(engine: str) -> dict[str, bool]:
    """Reproduction -> whether the bug is there, from a process of its own."""
    command = [sys.executable, "-m", f"tests.engine_bugs.{engine}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.full  # engines change with their versions, not with this code
@pytest.mark.parametrize(("engine", "bug"), [(engine, bug) for engine in ENGINES for bug in reproductions(engine)])
def test_it_is_still_there(engine: str, bug: str) -> None:
    assert _found(engine)[bug], f"{engine} is mended: drop what goes around it, and this reproduction"


def _losses_of_outputs() -> dict[str, list[float]]:
    """Those of two equal outputs on 3 rows in batches of 2, of which the last has an error of 3."""
    import keras
    import numpy as np

    import keras_flow as kf

    with kf.DataParallel().scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, [keras.layers.Identity(name=name)(inputs) for name in ("a", "b")])
        model.compile("sgd", "mse")
        x = np.array([[0.0], [0.0], [3.0]], "float32")
        y = [np.zeros_like(x)] * 2
        evaluated = model.evaluate(x, y, batch_size=2, verbose=0, return_dict=True)
        trained = model.fit(x, y, batch_size=2, shuffle=False, verbose=0).history
    return {name: [float(evaluated[name]), float(trained[name][0])] for name in ("loss", "a_loss", "b_loss")}


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_of_outputs_are_by_rows_under_a_distribution(engine: str, on_ranks: Any) -> None:
    """Where one device of TensorFlow gives 4.5: the short batch counts as a whole one (`known_differences`)."""
    assert on_ranks(engine)(_losses_of_outputs) == {"loss": [6.0, 6.0], "a_loss": [3.0, 3.0], "b_loss": [3.0, 3.0]}


def test_the_page_is_that_of_the_reproductions() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.engine_bugs.page`"
