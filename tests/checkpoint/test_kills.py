"""Jobs that are killed again and again end as undisturbed ones, and one that is asked to end saves before it does."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch import programs

CASES = [(engine, processes) for engine in ("torch", "jax", "tensorflow") for processes in (1, 2)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engine", "processes", "kills"),
    [("torch", 1, 4), *(pytest.param(*case, 34, marks=pytest.mark.full) for case in CASES)],
)
def test_no_step_is_lost_and_none_is_made_twice(engine: str, processes: int, kills: int) -> None:
    command = ["-m", "tests.checkpoint.kills", engine, "--processes", str(processes), "--kills", str(kills)]
    code, out, err = programs.finish(programs.start(command, engine), 1700)
    assert code == 0, out + err
    seen: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    assert (seen["kills"], seen["lost"], seen["twice"], seen["unequal"]) == (kills, 0, 0, [])


_PROGRAM = """
import json, os, sys, time
import numpy as np
import keras, keras_flow as kf
folder, seconds = sys.argv[1], float(sys.argv[2])
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        with open(f"{folder}/steps", "a") as file:
            print(self.params["steps"], file=file)
        time.sleep(seconds)
keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
checkpoint = kf.callbacks.Checkpoint(f"{folder}/checkpoints")  # at the end of an epoch, and on SIGTERM
history = model.fit(x, x[:, :1], batch_size=4, epochs=4, callbacks=[checkpoint, Slow()], verbose=0)
if kf.env.is_main_process():
    print(json.dumps([history.history, [value.tolist() for value in model.get_weights()]]))
"""


def _has_lines(path: Path, count: int) -> bool:
    return path.is_file() and path.read_text().count("\n") >= count


@pytest.mark.parametrize(
    ("engine", "processes"), [("torch", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in CASES[1:])]
)
def test_a_job_that_is_asked_to_end_saves_in_the_middle_of_an_epoch(
    engine: str, processes: int, tmp_path: Path
) -> None:
    script, ends = programs.write(tmp_path, _PROGRAM), {}
    command = ["-m", "keras_flow.launch", "--nproc_per_node", str(processes), "--timeout", "120", str(script)]
    for case, is_stopped in (("undisturbed", False), ("stopped", True), ("stopped", False)):
        folder = tmp_path / case
        folder.mkdir(exist_ok=True)
        process = programs.start([*command, str(folder), "0.2" if is_stopped else "0"], engine)
        if is_stopped:
            programs.wait_until(functools.partial(_has_lines, folder / "steps", 3 * processes), 200)
            process.send_signal(signal.SIGTERM)
        code, out, err = programs.finish(process, 200)
        if is_stopped:
            assert code == 128 + signal.SIGTERM, err
            (saved,) = (folder / "checkpoints").iterdir()
            training = json.loads((saved / "manifest.json").read_text())["training"]
            assert training["epoch"] == 0 and 3 <= training["batch"] < 10
        else:
            assert code == 0, err
            ends[case] = json.loads(out.strip().splitlines()[-1])
    assert ends["stopped"] == ends["undisturbed"]
