"""`keras_flow.compat.oneflow` against NumPy and plain Keras, on four ranks of every engine."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import keras_flow as kf
from keras_flow.backends.engines import that_train
from tests import sampling
from tests.compat import programs
from tests.launch import programs as jobs

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "older_worlds"


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_the_reference_programs(backend: str, on_ranks: Callable) -> None:
    on_ranks(backend)(programs.small)


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
@pytest.mark.parametrize(
    "program",
    [
        programs.consistent_lenet,
        programs.variables_of_ones_own,
        programs.batch_normalization,
        programs.micro_batches,
        programs.one_placement,
        programs.images_of_ones_own,
        programs.bad_input,
        programs.grid_of_devices,
        programs.optimizers,
        programs.older_config,
    ],
)
def test_more_programs(backend: str, program: Callable, on_ranks: Callable) -> None:
    on_ranks(backend)(program)


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
def test_checkpoints(backend: str, on_ranks: Callable, tmp_path: object) -> None:
    on_ranks(backend)(programs.checkpoints, str(tmp_path))


@pytest.mark.parametrize(
    ("nodes", "port", "text"),
    [
        (["10.1.1.1", "10.1.1.1"], 9988, "two nodes have the address 10.1.1.1"),
        (["10.1.1.1", "10.1.1.2"], None, "say the port of 10.1.1.1 by flow.env.ctrl_port"),
        (["10.1.1.1", "10.1.1.2"], 9988, "this machine has none of the addresses ['10.1.1.1', '10.1.1.2']"),
        (["127.0.0.1", "127.0.0.2"], 9988, "this machine has ['127.0.0.1', '127.0.0.2'] of the addresses"),
        (["127.0.0.1"], 70000, "flow.env.ctrl_port(70000): legal is a whole number from 1 to 65535"),
        ([{"address": "127.0.0.1"}], None, "takes nodes like"),
    ],
)
def test_machines_are_checked(nodes: list, port: int | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    import keras_flow.compat.oneflow as flow

    flow.clear_default_session()
    with pytest.raises(kf.FlowError, match=re.escape(text)):
        if port is not None:
            flow.env.ctrl_port(port)
        flow.env.machine([{"addr": node} if isinstance(node, str) else node for node in nodes])
        flow.env.init()
    flow.clear_default_session()


_BY_HAND = """
import numpy as np
import keras
import keras_flow.compat.oneflow as flow, keras_flow.compat.oneflow.typing as tp

flow.config.cpu_device_num(1)
flow.env.ctrl_port({port})
flow.env.machine([{{"addr": "127.0.0.1"}}, {{"addr": "127.0.0.2"}}])


@flow.global_function(type="train")
def job(x: tp.Numpy.Placeholder((5, 4))) -> tp.Numpy:
    y = flow.layers.dense(x, 1, kernel_initializer=flow.ones_initializer(), name="out")
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.5]), momentum=0).minimize(y)
    return y


x = np.arange(20, dtype="float32").reshape(5, 4)
assert job(x)[:, 0].tolist() == x.sum(1).tolist()
np.testing.assert_allclose(job(x)[:, 0], x @ (1 - 0.5 * x.mean(0)) - 0.5, rtol=1e-6)
import keras_flow as kf
print("ranks", kf.env.get_world_size(), "processes", kf.env.process_count())
"""


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_two_machines_started_by_hand(backend: str, tmp_path: Path) -> None:
    """Each machine starts the same program; here two addresses of one host, so NODE_RANK says which is which."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "job.py"
    file.write_text(_BY_HAND.format(port=port))
    started = [jobs.start([str(file)], backend, PYTHONPATH=str(ROOT), NODE_RANK=str(node)) for node in range(2)]
    for process in started:
        code, out, err = jobs.finish(process, 200)
        assert code == 0, err[-4000:]
        assert "ranks 2 processes 2" in out


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_a_port_in_use_is_named(backend: str, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        file = tmp_path / "job.py"
        file.write_text(_BY_HAND.format(port=port))
        code, _, err = jobs.finish(jobs.start([str(file)], backend, PYTHONPATH=str(ROOT), NODE_RANK="0"), 100)
    assert code != 0 and f"cannot listen at 127.0.0.1:{port}" in err, err[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
@pytest.mark.parametrize("ranks", ["--devices", "--nproc_per_node"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "mirrored", "hybrid", "pipeline"])
def test_examples(name: str, ranks: str, backend: str, tmp_path: Path) -> None:
    """Two ranks of one process on JAX and TensorFlow, and of two."""
    command = ["-m", "keras_flow.launch", ranks, "2", "--timeout", "120", str(EXAMPLES / f"oneflow_{name}.py")]
    save = ["--save", str(tmp_path / "models")] if name == "lenet" else []
    code, out, err = jobs.finish(jobs.start([*command, "--small", *save], backend, PYTHONPATH=str(ROOT)), 250)
    assert code == 0, err[-4000:]
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("epoch")]
    assert losses[-1] < 0.75 * losses[0], out
    assert not save or "'outlayer/kernel'" in out
