"""What reads a checkpoint without Keras: the program of the page of the format, and `kf.checkpoint`'s own functions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import keras_flow as kf
from keras_flow.cli.app import app
from tests.checkpoint.test_files import chunk_of, saved
from tests.docs import pages

pytestmark = pytest.mark.usefixtures("four_ranks")


def test_what_inspect_returns_prints_as_a_table(tmp_path: Path) -> None:
    """The rows of `keras-flow checkpoint`; more than a screen of tensors are counted."""
    saved(tmp_path)
    found = kf.checkpoint.inspect(tmp_path)
    lines = str(found).splitlines()
    assert lines[0] == "step: 1" and lines[2] == "training: outside of fit"
    (kernel,) = (line.split() for line in lines if line.split()[0] == "net/one/kernel")
    assert kernel == ["net/one/kernel", "float32", "[4,", "6]", "B,S(1)", "96", "B", "2"]
    assert str(found) in CliRunner().invoke(app, ["checkpoint", str(tmp_path)]).stdout.replace(
        "other steps: none\n", ""
    )
    many = replace(found, tensors={f"t{number}": found.tensors["net/one/kernel"] for number in range(45)})
    assert str(many).splitlines()[-2].split()[0] == "t39" and str(many).endswith("\nand 5 more; `.tensors` has all")


_READS = """
import sys
folder, name, file = sys.argv[1:]
blocked = "keras_flow", "keras", "jax", "tensorflow", "torch", "safetensors"
sys.modules |= dict.fromkeys(blocked)  # an import of one is an error
from read_checkpoint import np, read
np.save(file, read(folder, name))
"""
_LOOKS = """
import sys
from keras_flow import checkpoint
folder, name, file = sys.argv[1:]
assert checkpoint.verify(folder) == checkpoint.inspect(folder).bytes
__import__("numpy").save(file, checkpoint.read_tensor(folder, name))
assert not {"keras", "jax", "tensorflow", "torch"} & sys.modules.keys()
"""


def test_reading_needs_neither_keras_nor_an_engine(tmp_path: Path) -> None:
    """The page's program needs no keras_flow either, and sees damage."""
    kernel = np.asarray(saved(tmp_path / "there").layers[0].kernel)
    page = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
    (program,) = [text for _, title, text, _ in pages.blocks(page) if title == "read_checkpoint.py"]
    (tmp_path / "read_checkpoint.py").write_text(program)
    (tmp_path / "there" / "step-00000002.writing-1").mkdir()  # is no checkpoint
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def run(script: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(tmp_path / "there"), "net/one/kernel", str(tmp_path / "found.npy")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    for script in (_READS, _LOOKS):
        assert not (done := run(script)).returncode, done.stderr
        np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), kernel)
    path, chunk = chunk_of(tmp_path / "there", "net/one/kernel")
    data = path.read_bytes()
    path.write_bytes(data[: chunk.begin] + bytes([data[chunk.begin] ^ 1]) + data[chunk.begin + 1 :])
    assert f"net/one/kernel is damaged in {chunk.file}, bytes {chunk.begin} to {chunk.end}" in run(_READS).stderr
