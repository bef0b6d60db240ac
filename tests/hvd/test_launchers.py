"""`keras_flow.hvd` under the launchers that its users have: mpirun of OpenMPI and MPICH, srun and sbatch of Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests.launch import clients, programs, slurm

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

JOB = Path(__file__).with_name("elsewhere.py")

#: the recipe of a computing centre
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=job.log
srun {python} {job} {folder} 2
"""


def check(folder: Path, command: list[str], backend: str, **variables: str) -> str:
    """Run a command in a folder; what it printed."""
    environment = {**programs.ENVIRONMENT, "KERAS_BACKEND": backend, "PYTHONPATH": str(JOB.parents[2]), **variables}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-4000:]
    return done.stdout


@pytest.mark.parametrize("backend", that_train())
def test_openmpi(backend: str, tmp_path: Path) -> None:
    """Each process has one core, as mpirun binds two processes."""
    command = [clients.program("mpirun"), "-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "core"]
    out = check(tmp_path, [*command, sys.executable, str(JOB), str(tmp_path), "1"], backend, **clients.AS_ROOT)
    assert out.splitlines()[-1] == "done"


@pytest.mark.parametrize("backend", that_train())
def test_mpich(backend: str, tmp_path: Path) -> None:
    command = [clients.program("mpirun.mpich"), "-n", "2", sys.executable, str(JOB), str(tmp_path), "1"]
    out = check(tmp_path, command, backend)
    assert "done" in out.splitlines(), out


def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    out = check(tmp_path, [*command, str(JOB), str(tmp_path), "1"], "torch")
    assert "done" in out.splitlines(), out


@pytest.mark.parametrize("backend", that_train())
def test_srun_on_two_nodes(backend: str, tmp_path: Path) -> None:
    with slurm.cluster(tmp_path) as where:
        out = check(tmp_path, ["srun", "-N2", "-n2", sys.executable, str(JOB), str(tmp_path), "2"], backend, **where)
    assert "done" in out.splitlines(), out


@pytest.mark.parametrize("backend", that_train())
def test_sbatch_on_two_nodes(backend: str, tmp_path: Path) -> None:
    script = programs.write(tmp_path, SCRIPT.format(python=sys.executable, job=JOB, folder=tmp_path), "job.sh")
    with slurm.cluster(tmp_path) as where:
        check(tmp_path, ["sbatch", "--wait", str(script)], backend, **where)
    assert "done" in (tmp_path / "job.log").read_text().splitlines()
