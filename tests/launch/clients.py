"""A program that other launchers start, and what it must print: two epochs of a linear model by plain SGD."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launch import programs

#: what lets root call OpenMPI's mpirun
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

#: an attempt that is to fail has `FAILS` set
PROGRAM = """
import json, os, sys
import keras_flow as kf
kf.init()
import keras, numpy as np
if os.environ.get("FAILS") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    sys.exit(3 if kf.env.process_index() == 1 else 0)
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.linspace(-1, 1, 40).reshape(10, 4).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=5, epochs=2, verbose=0, shuffle=False).history
folder = os.environ["RESULTS"]
with open(os.path.join(folder, f"{kf.env.process_index()}.json"), "w") as file:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    json.dump({"loss": history["loss"], "ranks": kf.env.get_world_size(), "attempt": attempt}, file)
"""


def losses() -> list[float]:
    """The loss of each epoch, by numpy."""
    x = np.linspace(-1, 1, 40).reshape(10, 4).astype("float32").astype("float64")
    weights, bias, found = np.ones((4, 1)), np.zeros(1), []
    for _ in range(2):
        total = 0.0
        for rows in (x[:5], x[5:]):
            error = rows @ weights + bias - rows[:, :1]
            total += float((error**2).mean()) / 2
            weights = weights - 0.1 * 2 * rows.T @ error / 5
            bias = bias - 0.1 * 2 * error.mean(0)
        found.append(total)
    return found


def run(
    folder: Path, *commands: list[str], backend: str, count: int = 2, seconds: float = 150, **variables: str
) -> list[dict]:
    """Start a command on each "host", with the program behind it; what each process wrote, checked.

    Args:
        folder: for the program and its results.
        commands: of each host.
        backend: the engine.
        count: processes, in all.
        seconds: time limit.
        variables: of the environment.
    """
    script = programs.write(folder, PROGRAM)
    environment = {**programs.ENVIRONMENT, "KERAS_BACKEND": backend, "RESULTS": str(folder), **variables}
    environment["OMP_NUM_THREADS"] = "1"
    started = [
        subprocess.Popen(
            [*command, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        outputs = [each.communicate(timeout=seconds)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert all(each.returncode == 0 for each in started), "\n".join(outputs)[-4000:]
    results = [json.loads((folder / f"{index}.json").read_text()) for index in range(count)]
    for result in results:
        assert result["loss"] == pytest.approx(losses(), rel=1e-6)
        assert result["ranks"] % count == 0
    return results


def program(name: str) -> str:
    """A program of the environment of the tests, or of the system.

    The test that asks for it is skipped where it is missing.
    """
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def torchrun(*options: str) -> list[str]:
    """`torchrun OPTIONS` with two processes, unless the options say otherwise."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *options]
