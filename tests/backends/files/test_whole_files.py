"""Files that processes write in loops of their own, and jobs that are killed while they write."""

from __future__ import annotations

import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch import programs
from tests.ranks import Pool


def _saved_by_all(folder: str) -> list[str]:
    """What was wrong with a file that all ranks write, each time that this one has read it."""
    import keras

    import keras_flow as kf

    path = Path(folder) / "model.keras"
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64)])
    kf.DistributedDataParallel(model)
    found = []
    for _ in range(6):
        model.save(path)
        try:
            with zipfile.ZipFile(path) as file:
                found.append(file.testzip() or "")
        except (OSError, zipfile.BadZipFile) as error:
            found.append(repr(error))
    own = Path(folder) / f"own-{kf.env.process_index()}.weights.h5"  # nobody waits for those that write other files
    model.save_weights(own)
    model.load_weights(own)
    return found


def test_all_processes_of_a_loop_save_one_file(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    assert on_ranks("torch").on_each(_saved_by_all, str(tmp_path)) == [[""] * 6] * 4
    assert len(list(tmp_path.iterdir())) == 5


PROGRAM = """
import os, sys
import keras_flow as kf
kf.init()
import keras, numpy as np
how = sys.argv[1]
os.chdir(os.path.dirname(sys.argv[0]))
layers = keras.layers.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(256)
x = np.ones((16, 256), "float32")

class Saves(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if how != "hvd" or hvd.rank() == 0:
            self.model.save("model.keras")
        with open(f"epochs-{kf.env.process_index()}", "a") as file:
            print(epoch, file=file, flush=True)

callbacks = [keras.callbacks.CSVLogger("log.csv"), Saves()] if how == "fit" else [Saves()]
if how == "fit":
    with kf.DataParallel().scope():
        model = keras.Sequential(layers)
    model.compile("sgd", "mse")
else:
    import keras_flow.hvd as hvd
    hvd.init()
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(x, x, batch_size=8, epochs=100_000, verbose=0, callbacks=callbacks)
"""


def _epochs(folder: Path, index: int) -> int:
    path = folder / f"epochs-{index}"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
@pytest.mark.parametrize(("how", "killed"), [("fit", "launcher"), ("fit", "ranks"), ("hvd", "ranks")])
def test_a_job_that_is_killed_leaves_whole_files(backend: str, how: str, killed: str, tmp_path: Path) -> None:
    script = programs.write(tmp_path, PROGRAM)
    launcher = programs.start(["-m", "keras_flow.launch", "--nproc_per_node", "2", str(script), how], backend)
    programs.wait_until(lambda: all(_epochs(tmp_path, index) > 9 for index in (0, 1)), 150)
    below = programs.tree(launcher.pid)
    programs.wait_until(lambda: bool(list(tmp_path.glob(".keras-flow-writes-*/*"))), 30)  # amid a save
    if killed == "ranks":
        for each in below:
            if "keras_flow.launch.child" in each.cmdline():
                each.send_signal(signal.SIGKILL)
    else:
        launcher.kill()
    programs.finish(launcher, 60)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], "left running"
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert file.testzip() is None
    if how == "fit":
        rows = [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines(keepends=True)]
        assert rows[: _epochs(tmp_path, 0) + 1] == ["epoch", *map(str, range(_epochs(tmp_path, 0)))]
