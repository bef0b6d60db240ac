"""What the processes of a comparison write, as the process that started them reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import keras_flow as kf
from keras_flow.compare import deviations, runner, worker
from keras_flow.compare.known_differences import ProgramFacts
from keras_flow.compare.options import CompareJob, CompareOptions
from tests.compare.test_report import APART, GOOD

TINY = Path(__file__).parent / "tiny.py"


def job(folder: Path, *layouts: str) -> CompareJob:
    found = CompareJob("mine.py", "jax", layouts, 1, None, 2, 0, str(folder))
    for layout in layouts:
        found.of_run(layout).mkdir(parents=True)
    return found


@pytest.mark.usefixtures("four_ranks")
def test_layouts_whose_names_begin_alike_keep_their_ranks_apart(tmp_path: Path) -> None:
    own = job(tmp_path, "1", "pp2", "pp2-zbv", "pp2/zbv")
    for layout, ranks in (("pp2", (0, 1)), ("pp2-zbv", (0, 1, 2)), ("pp2/zbv", (3,))):
        worker._write_shards(own.of_run(layout), layout, SimpleNamespace(weights=[]), ranks)
    assert [list(runner._shards(own.of_run(layout))["shapes"]) for layout in own.layouts] == [
        [],
        [0, 1],
        [0, 1, 2],
        [3],
    ]


def test_a_folder_that_may_not_be_written_is_told_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(kf.FlowError, match="cannot be a folder for the report: it may not be written to"):
        runner.compare(CompareOptions(TINY, ("jax",), ("1",), out=tmp_path), Console(file=StringIO()))


def test_a_report_that_cannot_be_written_loses_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.json").mkdir()
    monkeypatch.setattr(runner, "_trained", lambda _: GOOD)
    shown = StringIO()
    with pytest.raises(kf.FlowError, match=r"the report cannot be written into --out .*: Is a directory"):
        runner.compare(CompareOptions(TINY, ("jax",), ("1",), out=tmp_path), Console(file=shown))
    assert "All 4 runs agree" in shown.getvalue()


def test_layouts_that_are_not_named_are_those_that_the_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Chosen(Exception):
        pass

    def check_file(file: Path, layouts: tuple[str, ...], **_: object) -> None:
        raise Chosen(*layouts)

    monkeypatch.setattr(runner, "check_file", check_file)
    bare = tmp_path / "bare.py"
    bare.write_text("def build_model(): pass")
    for file, layouts in ((TINY, ("1", "dp4", "tp4", "2x2")), (bare, ("1", "dp4"))):
        with pytest.raises(Chosen) as error:
            runner.compared(CompareOptions(file, ("jax",)))
        assert error.value.args == layouts
    assert "bare.py has no rules(): the layouts are 1,dp4. For tp4 and 2x2" in capsys.readouterr().err


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    own, path = job(tmp_path, "1"), tmp_path / "events-jax.jsonl"
    line = json.dumps({"layout": "1", "step": 5, "steps": 10, "loss": 0.25})
    path.write_text(line[:9])
    assert runner._doing(own, "train") == "jax: starting"
    path.write_text(f"{line}\n{line[:-1]}")
    assert runner._doing(own, "train") == "jax 1: step 5 of 10, its loss 0.2500"
    path.write_text(f'{line}\n{{"layout": "dp4", "step": 0, "steps": 10, "loss": 0.0}}\n')
    assert runner._doing(own, "train") == "jax dp4: the first step", "which compiles"
    assert runner._doing(own, "evaluate") == "jax: evaluating the weights of all runs"


def test_one_device_draws_as_the_layouts_do() -> None:
    stock, logical = (lambda drawn=drawn: SimpleNamespace(random=drawn) for drawn in ("stock", "logical"))
    assert worker.random_of_one_device({"1": None, "mine": stock, "own": stock}) == "stock"
    assert worker.random_of_one_device({"1": None, "mine": stock, "dp4": logical}) is None
    assert worker.random_of_one_device({"1": None}) is None


def test_weights_of_bfloat16_are_compared_and_perturbed(tmp_path: Path) -> None:
    own = job(tmp_path, "1", "dp2")
    first = np.linspace(-1, 1, 6, dtype="float32").astype(ml_dtypes.bfloat16)
    bit = worker._next(first, 0)
    assert bit.dtype == first.dtype and (bit != first).all()
    worker._write_weights(own.of_backend / "initial.npz", [first])
    for layout, weights in (("1", first * 2), ("dp2", bit)):
        worker._write_weights(own.of_run(layout) / "final.npz", [weights])
    runs = {("jax", layout): {"losses": [1.0], "program": {"random": "stock"}} for layout in own.layouts}
    trained: list[CompareJob] = []

    def train(again: CompareJob) -> None:
        trained.append(again)
        again.of_run("1").mkdir(parents=True)
        worker._write_weights(again.of_run("1") / "final.npz", [first * 2])

    (tmp_path / "initial.weights.h5").touch()
    found = runner._weights_of(own, runs, train)
    assert isinstance(found["1"], deviations.Deviation) and found["1"].value == 0
    assert found["dp2"].of_tolerance > 1
    assert [(each.perturbed, each.random) for each in trained] == [(True, "stock")]


def test_logs_without_a_loss_are_refused() -> None:
    assert worker._loss({"loss": np.float32(0.5)}) == 0.5
    with pytest.raises(kf.FlowError, match=r"logs no 'loss' but d_loss, g_loss\. .*add 'loss' to what its train_step"):
        worker._loss({"d_loss": 1.0, "g_loss": 2.0})


def test_what_is_wrong_with_a_run() -> None:
    good, apart = GOOD.runs[3], APART.runs[3]
    assert runner._failures(good) == []
    assert runner._failures(replace(good, between_share=None, between_backends=9.0)) == [], "not judged"
    assert runner._failures(apart) == ["torch tp2: loss deviates by 0.023 from the first backend's (limit 0.0015)"]
    for wrong, said in (
        ({"loss_share": 2.0, "loss_deviation": 0.5}, "torch tp2: loss deviates by 0.5, 2 times the tolerance"),
        ({"loss_share": float("nan")}, "torch tp2: loss deviates by "),
        ({"weights_share": 3.0, "weights_worst": "m/kernel"}, "torch tp2: weights deviate by "),
        ({"ranks_named": 4}, "torch tp2: used 2 of the 4 ranks that it names"),
        ({"evaluated": {"jax": 0.5, "torch": 0.4}}, "torch tp2: its weights evaluate to 0.5 on jax, to 0.4 on torch"),
        (
            {"losses": [0.5, float("inf")], "loss_share": 9.0},
            "torch tp2: the loss of step 2 is inf, and nothing can be",
        ),
    ):
        (found,) = runner._failures(replace(good, **wrong))
        assert found.startswith(said)


def test_known_differences_explain_what_they_can() -> None:
    runs = [
        replace(run, backend={"jax": "jax", "torch": "tensorflow"}[run.backend], weights_rounded=[])
        for run in APART.runs
    ]
    embedding = ProgramFacts(layers=("Embedding",), optimizer="Adam")

    def explained(program: ProgramFacts, of: list) -> list[tuple[str, list[str]]]:
        return [(known.name, known.explains) for known in runner._known(program, of)]

    repeated = "repeated rows of an embedding"
    assert explained(embedding, runs) == [(repeated, ["tensorflow tp2"])], "tensorflow 1 agrees"
    assert explained(replace(embedding, optimizer="SGD"), runs) == []
    assert explained(embedding, APART.runs) == [], "jax and torch have equal numbers"
    # what differs is a metric, and not the loss that is apart
    short = ProgramFacts(outputs=2, short_batch=3)
    assert explained(short, runs) == [("losses of outputs in a short last batch", [])]
    rounded = [*runs[:3], replace(runs[3], weights_rounded=["m/bias"])]
    assert explained(ProgramFacts(), rounded) == [("weights that rounding decides", ["tensorflow tp2"])]
