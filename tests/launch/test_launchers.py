"""Launchers of others, each by its real client: accelerate, OpenMPI's and MPICH's mpirun, Slurm, a `TF_CONFIG`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keras_flow.launch.environment import free_port
from tests.launch import clients, programs, slurm

pytestmark = pytest.mark.timeout(400)


def on_each(*default: str) -> pytest.MarkDecorator:
    """A test of each engine; those that are not named are left to `make test-full`."""
    engines = ("torch", "jax", "tensorflow")
    values = [each if each in default else pytest.param(each, marks=pytest.mark.full) for each in engines]
    return pytest.mark.parametrize("backend", values)


@on_each("jax")
def test_openmpi(backend: str, tmp_path: Path) -> None:
    command = [clients.program("mpirun"), "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable]
    clients.run(tmp_path, command, backend=backend, **clients.AS_ROOT)


@on_each()
def test_mpich(backend: str, tmp_path: Path) -> None:
    clients.run(tmp_path, [clients.program("mpiexec.mpich"), "-n", "2", sys.executable], backend=backend)


@on_each()
def test_accelerate(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    # on a host without GPUs too: it then calls torchrun with two processes, and with --cpu alone one process
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}"]
    clients.run(tmp_path, command, backend=backend)


@on_each()
def test_tf_config_with_a_chief(backend: str, tmp_path: Path) -> None:
    cluster = {"chief": [f"127.0.0.1:{free_port()}"], "worker": [f"127.0.0.1:{free_port()}"]}
    commands = [
        ["env", "TF_CONFIG=" + json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}), sys.executable]
        for kind in cluster
    ]
    clients.run(tmp_path, *commands, backend=backend)


@pytest.mark.full
def test_slurm(tmp_path: Path) -> None:
    """`srun` of the program itself on each engine, then the script of `--print-slurm` by `sbatch`: on two nodes."""
    with slurm.cluster(tmp_path) as where:
        for backend in ("torch", "jax", "tensorflow"):
            clients.run(tmp_path, ["srun", "-N2", "-n2", sys.executable], backend=backend, **where)
        for result in tmp_path.glob("[01].json"):
            result.unlink()
        _submit(tmp_path, where, "torch")
        results = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(4)]
        assert all(result["loss"] == pytest.approx(clients.losses(), rel=1e-6) for result in results)
        assert [result["ranks"] for result in results] == [4] * 4


def _submit(folder: Path, where: dict[str, str], backend: str) -> None:
    printing = ["-m", "keras_flow.launch", "--nnodes", "2", "--nproc_per_node", "2", "--print-slurm"]
    program = str(programs.write(folder, clients.PROGRAM))
    code, text, err = programs.finish(programs.start([*printing, program], backend))
    assert code == 0, err
    script = programs.write(folder, text, "job.sh")
    environment = {**programs.ENVIRONMENT, **where, "RESULTS": str(folder)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{where['PATH']}"
    submit = subprocess.run(
        ["sbatch", "--parsable", "--wait", str(script)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    time.sleep(0.5)
    logs = "\n".join(path.read_text() for path in folder.glob("*-[0-9]*.log"))
    assert submit.returncode == 0, f"{submit.stdout}{submit.stderr}\n{logs}"
