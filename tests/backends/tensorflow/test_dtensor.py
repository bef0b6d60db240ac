"""What the parity grid does not show of the TensorFlow backend. One process with its own virtual devices."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")


def _run(name: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.tensorflow.programs", name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["created_sharded", "steps", "layouts", "operations", "mirrored"])
def test_program(name: str) -> None:
    _run(name)
