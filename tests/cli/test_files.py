"""`keras-flow verify` and `keras-flow explain` on a user's file, in processes of their own."""

import json
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(240)

PROGRAM = """
import keras, numpy as np

def build_model():
    inputs = keras.Input((6,), name="features")
    hidden = keras.layers.Dense(8, "tanh", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def load_data():
    random = np.random.default_rng(0)
    return random.normal(size=(32, 6)).astype("float32"), random.integers(0, 3, 32)

def rules():
    return {"hidden/kernel": {"model": "S(1)"}, "hidden/bias": {"model": "S(0)"}, "logits/kernel": {"model": "S(0)"}}
"""


def run(*arguments: str, backend: str = "jax") -> tuple[int, str, str]:
    return programs.finish(programs.start(["-m", "keras_flow.cli.app", *arguments], backend), 200)


@sampling.one_in(2)
def test_verify_compares_with_one_device_and_says_so_by_its_status(tmp_path: Path) -> None:
    file = str(programs.write(tmp_path, PROGRAM))
    options = (file, "--layout", "2x2", "--backends", "jax", "--batch-size", "9")
    code, out, err = run("verify", *options)
    assert code == 0, err
    assert {"output", "loss", "gradient", "update"} <= set(out.split())
    code, out, err = run("verify", *options, "--tolerance", "0", "--json")
    assert code == 1, err
    (result,) = json.loads(out)
    assert not result["ok"] and None in [row["share"] for row in result["rows"]]
    assert {row["batch"] for row in result["rows"]} == {"8 rows", "9 rows (do not divide by 2)"}
    assert {row["quantity"] for row in result["rows"]} >= {"loss", "gradient", "update"}


def test_verify_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    file = str(programs.write(tmp_path, PROGRAM.replace("def build_model", "def make_model")))
    code, _, err = run("verify", file, "--layout", "2x2", "--backends", "jax")
    assert code == 1
    assert "build_model" in err
    code, _, err = run("verify", str(tmp_path / "none.py"), "--layout", "2x2")
    assert (code, "which does not exist" in err) == (1, True)


@sampling.one_in(2)
def test_explain_needs_neither_devices_nor_values(tmp_path: Path) -> None:
    file = str(programs.write(tmp_path, PROGRAM))
    code, out, err = run("explain", file, "--layout", "2x512", "--batch-size", "64")
    assert code == 0, err
    assert "hidden/kernel" in out and "all_reduce" in out, out
    code, _, err = run("explain", file, "--layout", "1", "--batch-size", "64")
    assert (code, "there is nothing to explain" in err) == (1, True)
