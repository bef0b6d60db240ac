"""`keras-flow init`: the command and the file, by questions or by options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from keras_flow.cli.app import app
from keras_flow.errors import FlowError

OPTIONS = ["--script", "train.py", "--engine", "torch", "--devices", "4", "--hosts", "1", "--launcher", "shell"]


def asked(*words: str, answers: str = "") -> str:
    result = CliRunner().invoke(app, ["init", *words], input=answers, catch_exceptions=False)
    return result.output


def test_without_a_question(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    said = asked(*OPTIONS, "--out", str(file))
    assert (
        file.read_text() == '#!/bin/sh\nexport KERAS_BACKEND=torch\nexec keras-flow launch --devices 4 train.py "$@"\n'
    )
    assert file.stat().st_mode & 0o100
    assert f"start it with: sh {file}" in said
    with pytest.raises(FlowError, match="is there already; give another --out, or --force"):
        asked(*OPTIONS, "--out", str(file))
    asked(*OPTIONS, "--out", str(file), "--force")


def test_a_script_that_asks_for_other_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    words = ["--script", str(script), *OPTIONS[2:]]
    script.write_text("import keras_flow\nkeras_flow.init(2)\n")
    assert "calls keras_flow.init for 2 ranks, and this job has 4" in asked(*words, "--out", str(tmp_path / "c"))
    script.write_text("import keras_flow as kf\nkf.run(print, devices=4)\n")
    assert "it fails until" not in asked(*words, "--out", str(tmp_path / "a"))
    words[words.index("--hosts") + 1] = "2"
    assert "train.py calls kf.run for 4 ranks, and this job has 8 ranks: it fails until" in asked(
        *words, "--out", str(tmp_path / "b")
    )


def test_by_questions(tmp_path: Path) -> None:
    file = tmp_path / "two.sh"
    asked(answers=f"my train.py\njax\n4\n2\nshell\n{file}\n")
    text = file.read_text()
    assert '--nnodes 2 --node_rank "$NODE_RANK"' in text and "--nproc_per_node 1 --devices_per_proc 4" in text
    assert "'my train.py' \"$@\"" in text
    done = subprocess.run(["sh", str(file)], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode and "NODE_RANK" in done.stderr, "what must be set is said"


def test_a_file_for_mpirun_on_several_hosts(tmp_path: Path) -> None:
    file = tmp_path / "start.sh"
    assert f"start it with: sh {file} HOST0,HOST1" in asked(
        *OPTIONS[:-3], "2", "--launcher", "mpirun", "--out", str(file)
    )
    done = subprocess.run(["sh", str(file)], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode and f"usage: sh {file} HOST0,HOST1,..." in done.stderr


def test_what_is_wrong_is_refused_before_the_questions(tmp_path: Path) -> None:
    for words, text in (
        (["--engine", "jaxx"], "engine 'jaxx' is none of .*; did you mean jax"),
        (["--launcher", "slrum"], "did you mean slurm"),
        (["--out", str(tmp_path)], "is there already"),
    ):
        with pytest.raises(FlowError, match=text):
            asked(*words)


def test_ctrl_c_at_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Abort from None  # as the prompt does

    monkeypatch.setattr(typer, "prompt", interrupted)
    assert CliRunner().invoke(app, ["init"]).exit_code == 130


def test_a_file_for_slurm(tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    words = [*OPTIONS[:-3], "2", "--launcher", "slurm", "--out", str(file)]
    assert f"sbatch {file}" in asked(*words)
    assert "#SBATCH" in file.read_text() and "train.py" in file.read_text()


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="engine 'mxnet' is none of jax, tensorflow, torch"):
        asked(*[word.replace("torch", "mxnet") for word in OPTIONS], "--out", str(tmp_path / "a"))
    with pytest.raises(FlowError, match="launcher 'moon' is none of shell, slurm, mpirun"):
        asked(*OPTIONS[:-1], "moon", "--out", str(tmp_path / "a"))
    with pytest.raises(FlowError, match="cannot write"):
        asked(*OPTIONS, "--out", str(tmp_path / "none" / "a"))


def test_the_file_runs(tmp_path: Path) -> None:
    script, file = tmp_path / "hello.py", tmp_path / "run.sh"
    script.write_text("import os, sys; print(os.environ['KERAS_BACKEND'], sys.argv[1:])")
    options = [*OPTIONS, "--script", str(script), "--engine", "jax", "--devices", "1", "--out", str(file)]
    asked(*options)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["sh", str(file), "--epochs", "2"], capture_output=True, text=True, env={"PATH": path}, timeout=60
    )
    assert done.stdout == "jax ['--epochs', '2']\n", done.stderr


def test_without_anybody_to_ask() -> None:
    with pytest.raises(FlowError, match="init got no answer; what it asks for can be given as options"):
        asked()
