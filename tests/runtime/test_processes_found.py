"""Who a process is, from what launchers set: each launcher's variables, contradictions, and what cannot be read."""

import json
import os
import subprocess
import sys

import pytest

from keras_flow.current import joining, processes
from keras_flow.errors import FlowError

pytestmark = pytest.mark.check

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-7",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def tf_config(kind: str = "worker", index: int = 1, **cluster: list[str]) -> dict[str, str]:
    roles = cluster or {"worker": ["a:1000", "b:1001", "b:1002"]}
    return {"TF_CONFIG": json.dumps({"cluster": roles, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environment", "index", "count", "local_index", "local_count", "host"),
    [
        ({}, 0, 1, 0, 1, "127.0.0.1"),
        (TORCHRUN, 3, 4, 1, 2, "host0"),
        (OPEN_MPI, 1, 2, 1, 2, "127.0.0.1"),
        (MPICH, 1, 2, 1, 2, "127.0.0.1"),
        (SLURM, 2, 4, 0, 2, "gpu07"),
        (tf_config(), 1, 3, 0, 2, "a"),
        (tf_config("worker", 0, chief=["a:1"], worker=["b:2"]), 1, 2, 0, 1, "a"),
    ],
    ids=["alone", "torchrun", "OpenMPI", "MPICH", "Slurm", "TF_CONFIG", "TF_CONFIG with a chief"],
)
def test_who_a_process_is(
    environment: dict[str, str], index: int, count: int, local_index: int, local_count: int, host: str
) -> None:
    found = processes.find(environment)
    assert (found.index, found.count, found.local_index, found.local_count) == (index, count, local_index, local_count)
    assert found.host == host
    assert count == 1 or 0 < found.port < 65536


@pytest.mark.parametrize("environment", [OPEN_MPI, MPICH, SLURM], ids=["OpenMPI", "MPICH", "Slurm"])
def test_all_processes_compute_one_port(environment: dict[str, str]) -> None:
    names = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}
    other = {name: "0" if name in names else value for name, value in environment.items()}
    assert processes.find(environment).port == processes.find(other).port
    assert processes.find({**environment, "MASTER_PORT": "1234"}).port == 1234


def test_programs_inside_of_scripts_compute_one_port() -> None:
    """MPICH names no job, and each process has a shell of its own above it."""
    program = "from keras_flow.current.processes import find; print(find({**__import__('os').environ}).port)"
    command = ["sh", "-c", f'"$0" -c "{program}"; true', sys.executable]
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_PORT", *processes.OF_JOB)}
    ports = {
        subprocess.run(command, env={**environment, **MPICH, "PMI_RANK": rank}, capture_output=True, check=True).stdout
        for rank in "01"
    }
    assert len(ports) == 1 and int(ports.pop()) in processes._PORTS


@pytest.mark.parametrize(("index", "node", "local"), [(0, 0, 2), (3, 1, 2), (4, 2, 1)])
def test_hosts_of_slurm_with_unequal_numbers(index: int, node: int, local: int) -> None:
    said = {"SLURM_PROCID": str(index), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(index - 2 * node)}
    found = processes.find({**SLURM, **said, "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"})
    assert (found.hosts, found.local_count) == (3, local)


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, MPICH, SLURM, tf_config()])
def test_without_these_variables_a_process_is_in_no_job(environment: dict[str, str]) -> None:
    left = {name: value for name, value in environment.items() if name not in processes.OF_JOB}
    assert processes.find(left) == processes.Processes()


def test_addresses_of_a_tf_config_are_kept() -> None:
    assert processes.find(tf_config()).addresses == ("a:1000", "b:1001", "b:1002")


def test_a_batch_script_of_slurm_is_no_process_of_a_step() -> None:
    assert processes.find({"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).count == 1


def test_a_job_of_one_process_gives_way_to_another_launcher() -> None:
    """`mpirun` inside of an allocation: Slurm's variables describe the one process that called it."""
    assert processes.find({**OPEN_MPI, **SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).source.startswith("OpenMPI")


def test_mpirun_starts_its_daemons_by_srun() -> None:
    """Their environment, which the processes have too, says a step of one task on each host."""
    daemon = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    mpi = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "MASTER_ADDR": "gpu07"}
    assert str(processes.find({**daemon, **mpi})).startswith("process 3 of 4, 1 of 2 on this host")
    mpich = {**MPICH, "PMI_SIZE": "4", "PMI_RANK": "3", "MASTER_ADDR": "gpu07"}
    assert str(processes.find({**daemon, **mpich})).startswith("process 3 of 4, 1 of 2 on this host")
    # in a batch script on one host mpiexec needs no srun
    assert processes.find({**MPICH, **SLURM, "SLURM_STEP_ID": "batch"}).source.startswith("MPICH")
    # srun --mpi=pmi2 sets PMI's variables itself
    assert processes.find({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}).source.startswith("Slurm")


def test_the_shell_of_salloc_is_one_process() -> None:
    shell = {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert processes.find({**shell, "SLURM_STEP_TASKS_PER_NODE": "1"}).count == 1


def test_hosts_with_unlike_numbers_of_processes() -> None:
    """Ray may place two processes on one node and one on another."""
    for local, index in ((2, 0), (1, 2)):
        said = {"RANK": str(index), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "a"}
        assert processes.find({**said, "GROUP_WORLD_SIZE": "2"}).hosts == 2


def test_a_launcher_on_each_host_that_another_one_started() -> None:
    """`srun torchrun ...`: Slurm speaks of the launchers, torchrun of the processes."""
    found = processes.find({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert (found.index, found.count) == (3, 4)
    found = processes.find({**OPEN_MPI, **TORCHRUN, "KERAS_FLOW_JOB": "folder"})
    assert (found.index, found.count) == (3, 4)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "describe no process"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; legal is a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "legal is 1 to 65535"),
        ({**TORCHRUN, **OPEN_MPI}, "contradicts itself"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR"),
        ({"TF_CONFIG": "{worker"}, "TF_CONFIG cannot be read"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG cannot be read"),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:2"]}}'},
            "TF_CONFIG says of no process which of 2 it is: it has",
        ),
        (tf_config(index=7), "says this process is worker 7, its cluster has worker 0, worker 1, worker 2"),
        (tf_config(index=0, worker=["host"]), "each must be host:port"),
        ({**tf_config(), "MASTER_PORT": "x"}, "MASTER_PORT is 'x'; legal is a whole number"),
    ],
)
def test_what_cannot_be_is_said(environment: dict[str, str], text: str) -> None:
    with pytest.raises(FlowError) as caught:
        processes.find(environment)
    assert text in str(caught.value)


def test_ranks_that_the_processes_do_not_divide() -> None:
    with pytest.raises(FlowError, match="asked for 5 ranks in 4 processes"):
        joining.own_share(5, processes.find(TORCHRUN))
