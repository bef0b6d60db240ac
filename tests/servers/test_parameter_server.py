"""Jobs of a chief, workers and servers: numbers, lost processes, what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keras_flow.backends import engines
from keras_flow.launch.environment import free_port

PROGRAM = Path(__file__).parent / "program.py"
_LAUNCH = [sys.executable, "-m", "keras_flow.launch", "--servers", "2", "--workers", "2", "--timeout", "60"]


#: those that have servers
ENGINES = [name for name, engine in engines.ENGINES.items() if engine.has_servers]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of a job's processes."""
    monkeypatch.setenv("KERAS_BACKEND", request.param)
    return request.param


def _environment(**more: str) -> dict[str, str]:
    root = str(PROGRAM.parents[2])
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": root, **more}


def _run(what: str, folder: Path, *options: str, limit: float = 240) -> subprocess.CompletedProcess[str]:
    command = [*_LAUNCH, *options, str(PROGRAM), what, str(folder)]
    return subprocess.run(command, env=_environment(), text=True, capture_output=True, timeout=limit)


def _found(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in result.stdout.splitlines() if line.startswith("FOUND ")]
    assert result.returncode == 0 and lines, result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.usefixtures("engine")
def test_the_numbers_of_one_device(tmp_path: Path) -> None:
    found = _found(_run("numbers", tmp_path))
    for name in ("sgd", "momentum", "adam", "nadam", "clipped", "staleness=0", "staleness=0, another model"):
        assert found[name] < 1e-5, name
    assert (found["servers"], found["saved"]) == (["job:ps 0", "job:ps 1"], 0.0)
    *served, alone = found["few rows"]
    assert served == pytest.approx([alone, alone], abs=1e-6)


@pytest.mark.usefixtures("engine")
def test_tables(tmp_path: Path) -> None:
    """A worker gets the rows that it uses, from the servers that have them; each counts once for an optimizer."""
    found = _found(_run("tables", tmp_path))
    assert found["off"] < 1e-5
    assert found["layout"] == ["S(0) (from parameter servers 0, 1)", [1, 2]]
    if found["sent"]:  # of 3.2 MB; other programs of this machine may use the loopback device too
        few, *many = found["sent"]
        assert max(many) - few < 400_000, found["sent"]


@pytest.mark.usefixtures("engine")
def test_a_checkpoint_has_the_updates_of_all_batches_that_it_counts(tmp_path: Path) -> None:
    found = _found(_run("saved_amid_batches", tmp_path))
    assert found["steps"] == [[batches, batches] for batches in (3, 6, 9, 12, 15)]


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_step_has_its_own_results_settings_and_scale(tmp_path: Path) -> None:
    found = _found(_run("steps", tmp_path))
    assert max(found.values()) < 1e-5, found


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_more_tables(tmp_path: Path) -> None:
    found = _found(_run("more_tables", tmp_path))
    for name in ("sgd", "momentum", "adam", "nadam", "clipped", "lamb", "adamw"):
        assert max(found[name]) < 1e-5, (name, found[name])
    *sync, free = found["bfloat16"]
    # parts of a batch are rounded by themselves: as far off as one device's half precision is from single, at most
    assert free < 1e-5 and max(sync) < found["rounded"] < 1e-2
    assert (found["parts to one"], found["parts to whole"], found["saved"]) == (0.0, 0.0, 0.0)


_RUN = """\
import keras, numpy as np
import keras_flow as kf

def main(rows):
    with kf.ParameterServer(servers=1).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    if not rows:
        raise ValueError("no rows, said main")
    return model.fit(np.ones((rows, 4)), np.ones((rows, 2)), epochs=2, verbose=0).history["loss"]

if __name__ == "__main__":
    print(kf.run(main, servers=1, workers=1, args=(9,)))
    both = {"servers": 1, "workers": 1}
    for options, rows in (({"servers": 1}, 9), ({**both, "devices": 2}, 9), (both, 0)):
        try: kf.run(main, args=(rows,), **options)
        except kf.FlowError as error: print(error)
"""


@pytest.mark.usefixtures("engine")
def test_a_function_is_run_with_servers_and_workers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_RUN)
    command = [sys.executable, str(tmp_path / "program.py")]
    result = subprocess.run(command, env=_environment(), text=True, capture_output=True, timeout=200)
    losses, one, both, failed, *_ = result.stdout.splitlines()
    # (4 - 1)^2; the step takes 0.1 * 3 from each of 4 weights and the bias: 1.5 less
    assert json.loads(losses) == pytest.approx([9.0, 2.25]), result.stderr
    assert "workers=None" in one and "go without devices=" in both
    assert failed == "the chief failed: ValueError: no rows, said main"


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_the_example() -> None:
    command = [*_LAUNCH, str(PROGRAM.parents[2] / "examples" / "older_worlds" / "parameter_server.py"), "--small"]
    result = subprocess.run(command, env=_environment(), text=True, capture_output=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    # 23 batches in each of 4 epochs
    assert "92 updates, at most " in result.stdout
    assert float(result.stdout.rpartition("accuracy ")[2].split()[0]) > 0.8, result.stdout


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_lost_worker_loses_no_batch(tmp_path: Path) -> None:
    result = _run("lost_worker", tmp_path)
    found = _found(result)
    assert (found["updates"], found["dropped"], found["iterations"], found["finite"]) == (15, 0, 15, True)
    assert found["staleness"] <= 2 and sum(found["of_worker"].values()) == 15
    assert "worker 1 failed: killed by SIGKILL; the others go on" in result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_lost_worker_that_is_started_again(tmp_path: Path) -> None:
    result = _run("lost_worker", tmp_path, "--max_restarts", "1")
    assert _found(result)["updates"] == 15
    assert "worker 1 failed: killed by SIGKILL; started again" in result.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("engine")
def test_workers_that_are_lost_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "1")
    found = _found(_run("workers_lost_at_any_moment", tmp_path, "--max_restarts", "20", limit=850))
    assert found["updates"] == found["iterations"] == found["batches"]
    assert found["killed"] == [10, 10]


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_worker_that_is_stopped_and_goes_on(tmp_path: Path) -> None:
    found = _found(_run("stopped_worker", tmp_path))
    assert found["off"] < 1e-5 and found["seconds"] > 2.0
    assert found["counted"] == [15, 0, 15] and found["staleness"] <= 2
    assert found["logs"]["server_updates"] == [5.0, 10.0, 15.0]


@pytest.mark.full
def test_the_batch_of_a_worker_that_hangs_is_done_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    result = _run("hung_worker", tmp_path)
    found = _found(result)
    assert found["off"] < 1e-5
    assert found["counted"] == [15, 15] and found["staleness"] <= 2 and found["repeated"] > 0
    assert found["logs"]["server_repeated"][-1] == found["repeated"]
    assert "another one computes it too" in result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_workers_that_hang_end_the_job(tmp_path: Path, engine: str) -> None:
    result = _run("hung_workers" if engine == "torch" else "hung_worker", tmp_path, "--timeout", "15")
    assert result.returncode == 1
    assert "no worker has finished a batch for 15 s: they hang, or are all gone" in result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_too_few_workers_end_the_job(tmp_path: Path) -> None:
    result = _run("lost_worker", tmp_path, "--min-workers", "2")
    assert result.returncode == 1
    assert "worker 1 failed: killed by SIGKILL, and of 2 workers 1 is left, --min-workers 2" in result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_lost_worker_keeps_the_numbers(tmp_path: Path) -> None:
    assert _found(_run("lost_worker_sync", tmp_path))["off"] < 1e-5


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_status_of_the_programs_own_is_kept(tmp_path: Path) -> None:
    result = _run("own_status", tmp_path)
    assert result.returncode == 3 and "the chief left with exit code 3" in result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_lost_server_ends_the_job(tmp_path: Path) -> None:
    result = _run("lost_server", tmp_path)
    assert result.returncode == 1
    assert "parameter server 1 failed: killed by SIGKILL. The variables that it held are lost" in result.stderr
    assert "kf.callbacks.Checkpoint" in result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_after_a_lost_server_a_job_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    assert _run("lost_server_and_a_checkpoint", tmp_path).returncode == 1
    found = _found(_run("lost_server_and_a_checkpoint", tmp_path))
    assert found["off"] < 1e-5
    assert found["iterations"] == found["batches"] == 15
    # killed after batch 8, with a checkpoint every 2: that of batch 6 was whole, and perhaps that of batch 8
    assert 15 - 8 <= found["of this job"] <= 15 - 6


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_a_job_that_is_asked_to_end_saves(tmp_path: Path) -> None:
    command = [*_LAUNCH, str(PROGRAM), "saves_when_asked", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=_environment(), text=True, stdout=pipe, stderr=pipe) as job:
        assert job.stdout is not None
        while (line := job.stdout.readline()) and "TRAINS" not in line:
            pass
        time.sleep(3)
        job.terminate()
        _, said = job.communicate(timeout=60)
    assert job.returncode == 143
    assert re.search(r"keras-flow: interrupted; saved .*asked/step-\d+: start the program again", said), said


@contextmanager
def _by_hand(what: str, folder: Path, workers: int, servers: int) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a job that no launcher starts, the chief first."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(1 + workers + servers)]
    cluster = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}

    def start(job: str, index: int) -> subprocess.Popen[str]:
        config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        environment = _environment(TF_CONFIG=config, KERAS_FLOW_TIMEOUT="120", KERAS_FLOW_TOKEN="of this test")
        command = [sys.executable, str(PROGRAM), what, str(folder)]
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    started = [start(job, index) for job in ("chief", "worker", "ps") for index in range(len(cluster[job]))]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


def test_the_bytes_of_a_step_do_not_grow_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch, whose messages are counted one by one."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with _by_hand("bytes_of_tables", tmp_path, workers=1, servers=2) as (chief, *_):
        said, errors = chief.communicate(timeout=240)
    assert chief.returncode == 0, errors[-3000:]
    few, many, divided = json.loads(said.split("FOUND ")[1])["sent"]
    # the rows travel to the worker, their gradients by the chief to the server; the rest is headers
    assert 3 * 32 * 4 * 4 < few < 10_000
    assert many - few < 100 and divided - few < 1000, (few, many, divided)


@pytest.mark.full
@pytest.mark.usefixtures("engine")
def test_tf_config_written_by_hand(tmp_path: Path) -> None:
    with _by_hand("by_hand", tmp_path, workers=2, servers=1) as (chief, *others):
        said, _ = chief.communicate(timeout=240)
        assert chief.returncode == 0 and '"off": ' in said
        assert json.loads(said.split("FOUND ")[1])["off"] < 1e-5
        until = time.monotonic() + 20.0
        while any(each.poll() is None for each in others) and time.monotonic() < until:
            time.sleep(0.1)
        assert [each.poll() for each in others] == [0, 0, 0]


def _refusal(code: str, backend: str = "torch") -> str:
    program = f"import keras_flow as kf\ntry:\n    {code}\nexcept kf.FlowError as error:\n    print(error)\n"
    environment = {**_environment(KERAS_BACKEND=backend)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, text=True, capture_output=True, timeout=120
    )
    return result.stdout + result.stderr[-500:]


def test_other_engines_name_what_they_have() -> None:
    said = _refusal("kf.ParameterServer()", "jax")
    assert "needs an engine that has parameter servers, tensorflow or torch; jax has none" in said
    assert "kf.CentralStorage()" in said and "zero=3" in said


def test_bad_input() -> None:
    code = """
    for given in ({"staleness": -1}, {"mode": "async", "staleness": True}, {"mode": "fast"}, {"staleness": 1}, {}):
        try:
            kf.ParameterServer(**given)
        except kf.FlowError as error:
            print(error)"""
    said = _refusal(f"pass{code}").splitlines()
    assert said[0] == "staleness=-1: legal is a whole number of at least 0 (updates), or None for any"
    assert said[1].startswith("staleness=True: legal is") and said[2] == 'mode is "sync" or "async", got \'fast\''
    assert 'staleness=1 goes with mode="async"' in said[3] and "found no parameter servers" in said[4]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--servers", "1"], "takes --servers and --workers together"),
        (["--servers", "1", "--workers", "1", "--devices", "2"], "without --devices"),
        (
            ["--servers", "1", "--workers", "1", "--print-slurm"],
            "and without --devices, --nproc_per_node, --on and --p",
        ),
    ],
)
def test_options_that_do_not_go_together(options: list[str], text: str) -> None:
    command = [sys.executable, "-m", "keras_flow.launch", *options, str(PROGRAM)]
    result = subprocess.run(command, env=_environment(), text=True, capture_output=True, timeout=120)
    assert result.returncode != 0 and text in " ".join((result.stdout + result.stderr).split())
