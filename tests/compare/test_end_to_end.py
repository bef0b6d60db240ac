"""`keras-flow compare`, as a user runs it: the exit status is the verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keras_flow.layout_names import LAYOUTS
from tests import sampling
from tests.launch import programs

TINY = str(Path(__file__).parent / "tiny.py")
pytestmark = pytest.mark.timeout(200)


def compare(out: Path, layouts: str, *options: str, file: str = TINY) -> tuple[int, str, str]:
    command = [
        "-m",
        "keras_flow.cli.app",
        "compare",
        file,
        "--backends",
        "jax",
        "--layouts",
        layouts,
        "--out",
        str(out),
    ]
    return programs.finish(programs.start([*command, "--steps", "6", "--batch-size", "14", *options], "jax"), 180)


@sampling.one_in(3)
def test_layouts_that_agree(tmp_path: Path) -> None:
    code, out, err = compare(tmp_path, "1,dp2,tp2")
    assert code == 0, out + err
    assert "All 3 runs agree within the tolerances." in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(run["layout"], run["ranks_used"], len(run["losses"])) for run in report["runs"]] == [
        ("1", 1, 6),
        ("dp2", 2, 6),
        ("tp2", 2, 6),
    ]
    assert all(run["loss_share"] <= 1 and run["weights_share"] <= 1 for run in report["runs"])
    assert report["runs"][2]["shapes"]["1"]["tiny/hidden/kernel"] == [6, 4]
    weights = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    split = 4 * (6 * 8 // 2 + 8 + 8 * 3 // 2 + 3)
    assert [run["bytes_per_rank"]["0"] for run in report["runs"]] == [weights, weights, split]
    assert "<svg" in (tmp_path / "report.html").read_text()


@pytest.mark.full  # tests/parity seeds faults too, and compares as this command does
def test_seeded_faults_are_caught(tmp_path: Path) -> None:
    code, out, err = compare(tmp_path, "dp3,scaled")
    assert code == 1, out + err
    failures = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert "jax dp3: used 2 of the 3 ranks that it names" in failures
    assert any(text.startswith("jax scaled: loss deviates by") for text in failures)
    assert any(text.startswith("jax scaled: weights deviate by") for text in failures)
    assert not any(text.startswith("jax dp3: loss") for text in failures)
    assert "FAILED" in out


@pytest.mark.full
def test_the_example_of_a_pipeline_agrees_with_one_device(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "pipeline.py"
    code, out, err = compare(tmp_path, "1,pp2,pp2xdp2", file=str(example))
    assert code == 0, out + err
    assert "All 3 runs agree within the tolerances." in out


def test_errors_of_the_file_are_one_text(tmp_path: Path) -> None:
    code, out, err = compare(tmp_path, "qq4")
    assert code == 1
    assert (
        f"keras-flow: unknown layout 'qq4': it is 1, {LAYOUTS}, or one of distributions(): ['dp3', 'scaled']"
    ) in err
    assert "Traceback" not in out + err


BLOCKS = """
import keras
import keras_flow as kf
from tests.compare.tiny import load_data

def build_model():
    layers = keras.layers
    blocks = [keras.Sequential([layers.Input((48,)), layers.Dropout(0.2), layers.Dense(48, "tanh")]) for _ in range(2)]
    model = keras.Sequential([layers.Input((6,)), layers.Dense(48), *blocks, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model

def rules():
    return {"kernel": {"model": kf.sbp.split(1)}}
"""


@sampling.one_in(3)
def test_layouts_that_compute_again(tmp_path: Path) -> None:
    file = programs.write(tmp_path, BLOCKS)
    code, out, err = compare(tmp_path, "1,dp2r,2x2z3r", file=str(file))
    assert code == 0, out + err
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert [(run["layout"], run["ranks_used"]) for run in runs] == [("1", 1), ("dp2r", 2), ("2x2z3r", 4)]
    assert all(run["loss_share"] <= 1 and run["weights_share"] <= 1 for run in runs)


EMBEDDING = """
import keras, numpy as np

def load_data():
    words = np.random.default_rng(0).integers(0, 4, (64, 8))
    return words, (words[:, :1] > 1).astype("float32")

def build_model():
    layers = keras.layers
    model = keras.Sequential([layers.Input((8,)), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(1)])
    model.compile(OPTIMIZER, "mse")
    return model
"""


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("optimizer", "status"), [("keras.optimizers.Adam(0.1)", 1), ("keras.optimizers.SGD(0.1)", 0)])
def test_engines_that_differ_by_a_known_cause(optimizer: str, status: int, tmp_path: Path) -> None:
    file = programs.write(tmp_path, EMBEDDING.replace("OPTIMIZER", optimizer))
    command = ["-m", "keras_flow.cli.app", "compare", str(file), "--backends", "jax,tensorflow", "--layouts", "1,dp2"]
    command += ["--steps", "6", "--batch-size", "16", "--out", str(tmp_path)]
    code, out, err = programs.finish(programs.start(command, "jax"), 500)
    assert code == status, out + err
    said = " ".join(out.split())
    report = json.loads((tmp_path / "report.json").read_text())
    explains = [(known["name"], known["explains"]) for known in report["known"]]
    cause = "repeated rows of an embedding"
    if status:
        assert explains == [(cause, ["tensorflow 1", "tensorflow dp2"])]
        assert all(" from the first backend's (limit " in failure for failure in report["failures"])
        assert f"{cause} (of tensorflow 1, tensorflow dp2)" in said
        assert cause in (tmp_path / "report.html").read_text()
    else:
        assert (explains, report["failures"]) == ([], [])
        assert "All 4 runs agree within the tolerances." in said
