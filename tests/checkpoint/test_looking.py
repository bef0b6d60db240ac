"""What reads a checkpoint without Keras: the program of the page of the format, and `kf.checkpoint`'s own functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.test_files import chunk_of, saved
from tests.docs import pages

pytestmark = pytest.mark.usefixtures("four_ranks")

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
