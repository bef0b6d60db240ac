"""A process of a training job that fails ends the job within 10 s on every engine, and is named."""

from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling
from tests.launch import faults, programs

pytestmark = pytest.mark.timeout(150)

#: kinds of which about a third are run; the others are in `make test-full`
QUICK = {("raises", 2), ("is killed", 2), ("is stopped", 1)}


def cases() -> list:
    return [
        pytest.param(
            backend,
            fault,
            hosts,
            marks=[
                pytest.mark.xdist_group(backend),
                sampling.one_in(3) if (fault, hosts) in QUICK else pytest.mark.full,
            ],
        )
        for backend in that_train()
        for fault in faults.FAULTS
        for hosts in ((2,) if fault == faults.NETWORK else (1, 2))
    ]


_IN_A_STEP = """
import os, signal
import keras_flow as kf, numpy as np
kf.init()
import keras, torch
class Killed(keras.layers.Layer):
    def call(self, x):
        if RULES is None and optimizer.iterations == 3 and kf.env.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x
optimizer = keras.optimizers.SGD()
x = np.zeros((64, 8), "float32")
mesh = kf.Placement([0, 1], axis_names=("data",))
with kf.ModelParallel(mesh, rules=RULES).scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1), Killed()])
    model.compile(optimizer, "mse")
    model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0)
"""


@pytest.mark.full
def test_a_rank_that_is_killed_in_a_step_says_where_it_was(tmp_path: Path) -> None:
    script = programs.write(tmp_path, _IN_A_STEP.replace("RULES", "None"))
    code, _, err = programs.finish(programs.start(["-m", "keras_flow.launch", "--devices", "2", str(script)]), 140)
    assert code == 137
    assert "rank 1 of 2 failed: killed by SIGKILL\nThe last call it entered that waits for other ranks: " in err, err
    assert "batch 3 (from 0) of its data, a step of model.fit() (program.py, line 17)." in err
    assert "its output" not in err


@pytest.mark.full
def test_a_wrong_rule_is_said_once(tmp_path: Path) -> None:
    script = programs.write(tmp_path, _IN_A_STEP.replace("RULES", "{'hiden/kernel': {'data': 'S(0)'}}"))
    code, out, err = programs.finish(programs.start(["-m", "keras_flow.launch", "--devices", "2", str(script)]), 140)
    assert code == 1
    assert (out + err).count("matched no variable") == 1, out + err


@pytest.mark.parametrize(("backend", "fault", "hosts"), cases())
def test_a_process_that_fails_ends_the_job(backend: str, fault: str, hosts: int, tmp_path: Path) -> None:
    ending = faults.end(backend, fault, hosts, tmp_path)
    limit = 10 + (faults.TIMEOUT if fault == "hangs" else 0)
    assert ending.seconds < limit
    assert ending.named, ending.error
    assert all(ending.code)
    assert not ending.left
