"""`kf.on_preemption`: a checkpoint of one step in all processes, from which a job goes on as if nothing had been."""

import json
import signal
import time
from pathlib import Path

import pytest

from keras_flow.errors import FlowError
from keras_flow.launch import preemption
from keras_flow.launch.environment import free_port
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

PROGRAM = """
import json, os, sys, time
import keras_flow as kf
kf.init()
import keras, numpy as np
folder, stops = sys.argv[1], int(sys.argv[2])
state = os.path.join(folder, "state.keras")
keras.utils.set_random_seed(0)
x = np.linspace(-1, 1, 160).reshape(40, 4).astype("float32")
y = np.cos(x.sum(1, keepdims=True))
seen = []
class Sees(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.append(1)  # not asked for its model, which on JAX gives the weights back
        open(os.path.join(folder, f"begun-{kf.env.process_index()}"), "w").close()
        # processes are in different steps when the signal comes
        time.sleep(0.05 * (1 + kf.env.process_index()) if stops else 0)
with kf.DataParallel(random="logical").scope():
    if os.path.exists(state):
        model = keras.models.load_model(state)
    else:
        hidden = keras.layers.Dense(8, activation="tanh")
        model = keras.Sequential([keras.layers.Input((4,)), hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    def save():
        model.save(state)
        with open(os.path.join(folder, f"stopped-{kf.env.process_index()}"), "w") as file:
            json.dump(len(seen), file)
    if stops:
        kf.on_preemption(save)
    steps = 300 if stops else int(sys.argv[3])
    done = int(np.asarray(keras.ops.convert_to_numpy(model.optimizer.iterations)))
    # one batch a step, always the same: the order of batches is not what is tested here
    model.fit(x, y, batch_size=40, epochs=steps - done, verbose=0, callbacks=[Sees()])
    loss = model.evaluate(x, y, batch_size=40, verbose=0)
if kf.env.is_main_process():
    print(json.dumps({"loss": float(loss), "iterations": done + len(seen)}))
"""


def result(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


@pytest.mark.parametrize("backend", sampling.on_one(["jax", "torch", "tensorflow"]))
@pytest.mark.parametrize("hosts", sampling.some([1, 2], every=4))
def test_a_checkpoint_before_the_end(backend: str, hosts: int, tmp_path: Path) -> None:
    script = programs.write(tmp_path, PROGRAM)
    command = [
        "-m",
        "keras_flow.launch",
        "--nnodes",
        str(hosts),
        "--nproc_per_node",
        str(2 // hosts),
        "--timeout",
        "60",
    ]
    command += ["--master_port", str(free_port())]
    launchers = [
        programs.start(
            [*command, "--node_rank", str(node), str(script), str(tmp_path), "1"], backend, KERAS_FLOW_TOKEN="secret"
        )
        for node in range(hosts)
    ]
    programs.wait_until(lambda: all((tmp_path / f"begun-{index}").exists() for index in (0, 1)), 120)
    time.sleep(0.5)
    launchers[0].send_signal(signal.SIGTERM)  # of two hosts one is told
    outputs = [programs.finish(launcher, 40) for launcher in launchers]
    assert outputs[0][0] == 143, outputs[0][2]
    assert all(code == 143 for code, _, _ in outputs)
    assert f"keras-flow: interrupted; saved {tmp_path / 'state.keras'}: keras.models.load_model(" in outputs[0][2]
    stopped = [json.loads((tmp_path / f"stopped-{index}").read_text()) for index in (0, 1)]
    assert stopped[0] == stopped[1] > 1, "the callback ran after one step in both"
    # from there on, and without an end: the same
    steps = stopped[0] + 5
    losses = []
    for folder in (tmp_path, tmp_path / "undisturbed"):
        folder.mkdir(exist_ok=True)
        alone = ["-m", "keras_flow.launch", "--nproc_per_node", "2", str(script), str(folder), "0", str(steps)]
        code, out, err = programs.finish(programs.start(alone, backend), 100)
        assert code == 0, err
        assert result(out)["iterations"] == steps
        losses.append(result(out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


ALONE = """
import sys, time
import keras_flow as kf
kf.init(1)
import keras
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
point = kf.on_preemption(lambda: model.save_weights(sys.argv[1]))
try:
    kf.on_preemption(print)
except kf.FlowError as error:
    print(error)
print("ready", flush=True)
for step in range(200):
    time.sleep(0.05)
    point.check()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_loop_of_ones_own_in_one_process(number: signal.Signals, status: int, tmp_path: Path) -> None:
    path = tmp_path / "state.weights.h5"
    process = programs.start([str(programs.write(tmp_path, ALONE)), str(path)], "jax")
    assert process.stdout is not None
    assert "was called before in this program" in process.stdout.readline()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, out, err = programs.finish(process, 20)
    assert (code, out) == (status, ""), err
    assert (
        err.splitlines()[-2]
        == "keras-flow: asked to end; the callback runs after the next training step, if all processes reach it"
    )
    # said of files alone that were written beside their name: a second signal would have left the old one
    assert err.splitlines()[-1].startswith(f"keras-flow: interrupted; saved {path}"), err


def test_a_job_that_cannot_be_joined_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FlowError("no coordinator")

    monkeypatch.setattr(preemption, "backend", fail)
    for _ in range(2):
        with pytest.raises(FlowError, match="no coordinator"):
            preemption.on_preemption(print)
