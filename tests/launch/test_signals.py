"""A job with `kf.on_preemption` is asked to end: whoever is asked, however often, the file is whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from keras_flow.launch.environment import free_port
from tests import sampling
from tests.launch import clients, programs

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import contextlib, ctypes, os, signal, sys, time
import keras_flow as kf
kf.init()
import keras, numpy as np
folder, mode = sys.argv[1:]
keras.utils.set_random_seed(0)
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        index = kf.env.process_index()
        if mode == "deaf" and batch == 1 and index == 1:
            # C code that holds Python's lock, and that no signal interrupts
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            ctypes.PyDLL(None).sleep(14)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if mode == "behind" and batch == 1 and index == 1:
            time.sleep(4)  # process 0 is in the next step meanwhile, which waits for this process
        if mode != "validates":
            open(os.path.join(folder, f"begun-{index}"), "w").close()
        time.sleep(0.1)
    def on_test_batch_end(self, batch, logs=None):
        open(os.path.join(folder, f"begun-{kf.env.process_index()}"), "w").close()
        time.sleep(0.5)
    def on_test_end(self, logs=None):
        open(os.path.join(folder, f"validated-{kf.env.process_index()}"), "w").close()
def save():
    if mode == "fails" and kf.env.process_index() == 1:
        raise ValueError("no room")
    if mode == "validates":
        assert os.path.exists(f"validated-{kf.env.process_index()}")
    model.save("state.keras")
    if mode == "hangs":
        time.sleep(99)
    open(os.path.join(folder, f"ended-{kf.env.process_index()}"), "w").close()
os.chdir(folder)
if mode == "split":
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    scope = kf.ModelParallel(mesh, rules={"dense/kernel": {"model": "S(1)"}}).scope()
else:
    scope = contextlib.nullcontext() if mode == "loop" else kf.DataParallel().scope()
with scope:
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [Slow()]
    if mode in ("checkpoints", "behind", "deaf"):
        callbacks.append(kf.callbacks.Checkpoint("checkpoints", save_freq=1000))
    elif mode not in ("bare", "loop"):
        kf.on_preemption(save)
    x = np.random.default_rng(1).normal(size=(240, 8)).astype("float32")
    if mode == "loop":
        ddp = kf.DistributedDataParallel(model)
        step = ddp.value_and_grad(lambda rows: keras.ops.mean((ddp(rows) - rows[:, :1]) ** 2))
        point = kf.on_preemption(save)
        for batch in range(800):
            loss, gradients = step(x[:30])
            model.optimizer.apply(gradients, model.trainable_weights)
            callbacks[0].on_train_batch_end(batch)
            point.check()
    rows = x[:120] if mode == "validates" else x
    validation = (x, x[:, :1]) if mode == "validates" else None
    model.fit(rows, rows[:, :1], batch_size=30, epochs=100, verbose=0, callbacks=callbacks, validation_data=validation)
"""

#: runs Python in a group of its own
GROUP = "import os, sys; os.setpgid(0, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
#: processes of each host, ranks of each process
ONE, TWO, TWO_BY_TWO = (1, 1), (2, 1), (2, 2)


def ended(
    folder: Path,
    backend: str,
    numbers: list[signal.Signals],
    target: str = "launcher",
    shape: tuple[int, int] = TWO,
    hosts: int = 1,
    mode: str = "saves",
    **variables: str,
) -> tuple[list[int], str]:
    """Start a job, send signals; exit statuses of the launchers, and what the one that was asked said."""
    script = programs.write(folder, PROGRAM)
    (folder / "state.keras").write_text("the old one")
    processes, share = shape
    command = ["-m", "keras_flow.launch", "--nnodes", str(hosts), "--nproc_per_node", str(processes)]
    command += ["--master_port", str(free_port()), "--timeout", "90"]
    command += [] if backend == "torch" else ["--devices_per_proc", str(share)]
    if target == "rank" and processes * hosts == 1:  # otherwise one process becomes the script's
        command += ["--max_restarts", "1"]
    if target == "program":  # no launcher: its process has become the script's
        command = ["-m", "keras_flow.launch", "--devices", "1" if backend == "torch" else str(share)]
    if target in ("group", "program"):  # as a terminal does: all processes of its group
        command = ["-c", GROUP, *command]
    launchers = [
        programs.start(
            [*command, "--node_rank", str(node), str(script), str(folder), mode],
            backend,
            KERAS_FLOW_TOKEN="secret",
            **variables,
        )
        for node in range(hosts)
    ]
    asked = launchers[-1]
    count = processes * hosts
    programs.wait_until(lambda: all((folder / f"begun-{index}").exists() for index in range(count)), 150)
    time.sleep(0.3)
    rank = next((each for each in programs.tree(asked.pid) if "keras_flow.launch.child" in each.cmdline()), None)
    for number in numbers:
        if target == "launcher":
            asked.send_signal(number)
        elif target in ("group", "program"):
            os.killpg(asked.pid, number)
        else:
            assert rank is not None
            os.kill(rank.pid, number)
        time.sleep(0.5 if mode == "hangs" else 0.05)
    below = [each for launcher in launchers if launcher.poll() is None for each in programs.tree(launcher.pid)]
    outputs = [programs.finish(launcher, 100) for launcher in launchers]
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], "left running"
    assert not list(folder.glob(".keras-flow-writes-*")) or mode == "hangs"
    return [code for code, _, _ in outputs], outputs[-1][2]


def all_ended(folder: Path, count: int) -> bool:
    return zipfile.is_zipfile(folder / "state.keras") and len(list(folder.glob("ended-*"))) == count


def old_or_new(folder: Path) -> bool:
    path = folder / "state.keras"
    return path.read_bytes() == b"the old one" or zipfile.is_zipfile(path)


INT, TERM = signal.SIGINT, signal.SIGTERM


def full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize("backend", sampling.on_one(["jax", "torch", "tensorflow"]))
@pytest.mark.parametrize(
    ("numbers", "target", "shape", "hosts"),
    [
        ([INT], "launcher", TWO, 1),
        full([TERM], "rank", TWO, 1),
        full([INT], "rank", TWO, 1),
        full([TERM, TERM], "launcher", TWO, 1),
        full([TERM], "launcher", ONE, 1),
        full([INT], "launcher", ONE, 1),
        full([INT], "launcher", TWO_BY_TWO, 1),
        full([TERM], "launcher", ONE, 2),
        full([INT], "rank", ONE, 2),
        full([TERM], "rank", ONE, 1),
        full([INT], "group", TWO, 1),
        full([TERM], "group", TWO, 1),
        full([TERM, TERM], "rank", TWO, 1),
        full([TERM], "launcher", TWO_BY_TWO, 1),
        full([INT], "group", TWO, 2),
        full([INT], "program", (1, 2), 1),
        full([TERM], "program", (1, 2), 1),
    ],
)
def test_the_callback_ends(
    backend: str, numbers: list[signal.Signals], target: str, shape: tuple[int, int], hosts: int, tmp_path: Path
) -> None:
    codes, said = ended(tmp_path, backend, numbers, target, shape, hosts)
    assert all_ended(tmp_path, shape[0] * hosts), said
    assert codes == [128 + numbers[0]] * hosts, said
    lines = [line for line in said.splitlines() if "interrupted" in line]
    if hosts == 1:
        assert lines == [
            "keras-flow: interrupted; saved state.keras: keras.models.load_model('state.keras') goes on from there"
        ], said
    else:  # the host of process 0 is another one
        assert lines == [
            "keras-flow: interrupted; the callback of kf.on_preemption has ended in every rank of this host"
        ]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
@pytest.mark.parametrize("mode", ["validates", "loop", "split"])
def test_beside_steps_of_data_parallel(backend: str, mode: str, tmp_path: Path) -> None:
    """In a long validation, in a loop of one's own whose processes all save, with weights that are gathered."""
    shape = TWO if mode != "split" else (4, 1) if backend == "torch" else TWO_BY_TWO
    codes, said = ended(tmp_path, backend, [TERM], shape=shape, mode=mode)
    assert codes == [143], said
    assert all_ended(tmp_path, shape[0]), said
    lines = [line for line in said.splitlines() if line.startswith("keras-flow: ")]
    assert lines == [
        "keras-flow: asked to end; the callback runs after the next training step, if all processes reach it",
        "keras-flow: interrupted; saved state.keras: keras.models.load_model('state.keras') goes on from there",
    ], said


@pytest.mark.parametrize("backend", sampling.on_one(["jax", "torch", "tensorflow"]))
def test_a_process_without_a_callback_ends(backend: str, tmp_path: Path) -> None:
    """The coordination services of JAX and TensorFlow take SIGTERM for themselves; they must not keep it."""
    codes, said = ended(tmp_path, backend, [TERM], "rank", mode="bare")
    assert codes == [143], said
    assert re.search(r"(rank|process) \d of 2 failed: killed by SIGTERM", said), said


@pytest.mark.parametrize("backend", sampling.on_one(["jax", "torch", "tensorflow"]))
def test_a_checkpoint_is_named_by_its_folder(backend: str, tmp_path: Path) -> None:
    codes, said = ended(tmp_path, backend, [TERM], mode="checkpoints")
    assert codes == [143], said
    steps = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert steps, said
    step = steps[-1]
    lines = [line for line in said.splitlines() if "interrupted" in line]
    assert lines == [f"keras-flow: interrupted; saved {step}: start the program again, and it goes on from there"], said


@pytest.mark.parametrize("backend", sampling.on_one(["jax", "torch", "tensorflow"]))
@pytest.mark.parametrize("mode", ["behind", pytest.param("deaf", marks=pytest.mark.full)])
def test_a_process_that_is_behind_or_hears_late_is_waited_for(backend: str, mode: str, tmp_path: Path) -> None:
    codes, said = ended(tmp_path, backend, [TERM], mode=mode, KERAS_FLOW_GRACE="90")
    assert codes == [143], said
    assert sorted((tmp_path / "checkpoints").glob("step-*")), said


@pytest.mark.full
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_a_second_ctrl_c(backend: str, tmp_path: Path) -> None:
    codes, said = ended(tmp_path, backend, [INT, INT], mode="hangs")
    assert codes == [130]
    assert "did not finish the callback of kf.on_preemption before a second Ctrl-C; each file is whole" in said
    assert old_or_new(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_a_callback_that_fails_or_takes_too_long(backend: str, tmp_path: Path) -> None:
    codes, said = ended(tmp_path, backend, [TERM], mode="fails", KERAS_FLOW_GRACE="20")
    assert codes == [143]
    assert "interrupted; each file is whole, the old one or the new. " in said
    assert "ValueError: no room" in said
    # the other rank may have written it by then
    assert old_or_new(tmp_path)
    for each in tmp_path.glob("begun-*"):
        each.unlink()
    codes, said = ended(tmp_path, backend, [TERM], mode="hangs", KERAS_FLOW_GRACE="4")
    assert codes == [143]
    assert "0, 1 did not finish the callback of kf.on_preemption within 4 s (KERAS_FLOW_GRACE)" in said


@pytest.mark.full
@pytest.mark.parametrize("client", ["torchrun", "mpirun"])
def test_launchers_of_others_hand_it_on(client: str, tmp_path: Path) -> None:
    mpirun = ["-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable]
    command = clients.torchrun("--standalone") if client == "torchrun" else [clients.program("mpirun"), *mpirun]
    script = programs.write(tmp_path, PROGRAM)
    environment = {**programs.ENVIRONMENT, **clients.AS_ROOT, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    with open(tmp_path / "said", "w") as said:
        launcher = subprocess.Popen(
            [*command, str(script), str(tmp_path), "saves"], env=environment, stdout=said, stderr=said
        )
        programs.wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 150)
        below = programs.tree(launcher.pid)
        launcher.send_signal(TERM)
        launcher.wait(60)
    _, alive = psutil.wait_procs(below, timeout=10)
    words = (tmp_path / "said").read_text()
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], words
    # OpenMPI 5 kills them some tenths of a second later, and has no setting for it
    assert old_or_new(tmp_path), words
    if client == "torchrun":
        assert all_ended(tmp_path, 2), words
        assert "keras-flow: interrupted; saved state.keras" in words
