"""`Processes`: what the environment says of the processes of a job and which of them this one is.

Whoever starts a job (keras-flow, torchrun, Slurm, mpirun, a `TF_CONFIG`) tells each process by environment variables.
They are read here, once for all engines.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import psutil

from keras_flow import settings
from keras_flow.current import tf_config
from keras_flow.errors import FlowError

#: where rank 0 listens if nothing says so; below the ports that Linux hands out by itself
_PORTS = range(20000, 32000)

LOOPBACK = "127.0.0.1"

#: set by launchers that may themselves be started by Slurm or mpirun, one on each host: torchrun, keras-flow launch.
#: What these say of the launchers is then not said of the processes
INNER = ("TORCHELASTIC_RUN_ID", settings.JOB)

#: the variables without which a process is in no job
OF_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TF_CONFIG")


@dataclass(frozen=True)
class Processes:
    """The processes of a job, as its environment describes them to one of them.

    Attributes:
        index: index of this process, 0 to `count - 1`.
        count: number of processes in the job.
        local_index: index among the processes of this host.
        local_count: number of processes on this host.
        hosts: number of hosts, as far as it is said: where all have as many processes as this one, or by Slurm.
        host: name or address of the host of process 0, where the engine's coordinator listens.
        port: its port there.
        source: who said so, in words.
        addresses: `host:port` of each process, where they are known beforehand (`TF_CONFIG`).
        port_is_held: the launcher itself listens there, with a store for the processes (torchrun's agent).
    """

    index: int = 0
    count: int = 1
    local_index: int = 0
    local_count: int = 1
    hosts: int = 1
    host: str = LOOPBACK
    port: int = 0
    source: str = "no launcher"
    addresses: tuple[str, ...] = ()
    port_is_held: bool = False

    @property
    def coordinator(self) -> str:
        """`host:port` of process 0."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if self.count == 1:
            return f"one process ({self.source})"
        return (
            f"process {self.index} of {self.count}, {self.local_index} of {self.local_count} on this host, "
            f"coordinator {self.coordinator} ({self.source})"
        )


def find(environment: Mapping[str, str] | None = None) -> Processes:
    """Read who this process is from the environment variables that are set.

    In this order: RANK and WORLD_SIZE (keras-flow launch, torchrun), OpenMPI, MPICH, Slurm (inside `srun`), TF_CONFIG.
    Where TF_CONFIG names parameter servers, whoever started them, the chief runs the program alone, and workers and
    servers serve it (`kf.ParameterServer`).
    MASTER_ADDR and MASTER_PORT, where they are set, name the coordinator for each of them.

    Raises:
        FlowError: variables contradict each other, are incomplete, or do not hold what they should.

    Example:
        >>> print(find({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}))
        process 1 of 2, 1 of 2 on this host, coordinator 127.0.0.1:29500 (RANK and WORLD_SIZE)
    """
    environment = os.environ if environment is None else environment
    if any(name in environment for name in INNER) and (inner := _of_rank(environment)) is not None:
        return inner
    config = tf_config.read(environment)
    if config is not None and config.cluster.get("ps"):
        return Processes(source="TF_CONFIG")
    found = [processes for read in _READERS if (processes := read(environment)) is not None]
    several = [processes for processes in found if processes.count > 1]
    if not several:
        return found[0] if found else Processes()
    first, *others = several
    for other in others:
        if (other.index, other.count) != (first.index, first.count):
            raise FlowError(
                f"the environment contradicts itself: {first.source} say process {first.index} of {first.count}, "
                f"{other.source} say process {other.index} of {other.count}. Unset those that are left over from "
                "another launcher."
            )
    return first


def _of_rank(environment: Mapping[str, str]) -> Processes | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    for name in ("RANK", "WORLD_SIZE"):
        if name not in environment:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise FlowError(f"{other} is set and {name} is not: a launcher sets both. Set {name}, or unset {other}.")
    found = _described(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK and WORLD_SIZE")
    # inside `keras-flow launch`, started by torchrun on each host, it is said of the launchers
    is_held = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and settings.JOB not in environment
    hosts = "GROUP_WORLD_SIZE"  # hosts may have unlike numbers of processes (Ray)
    count = {"hosts": _number(environment, hosts)} if hosts in environment else {}
    return None if found is None else replace(found, port_is_held=is_held, **count)


def _of_open_mpi(environment: Mapping[str, str]) -> Processes | None:
    prefix = "OMPI_COMM_WORLD"
    names = (f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE")
    return _described(environment, *names, "OpenMPI's variables", environment.get("PMIX_NAMESPACE"))


def _of_mpich(environment: Mapping[str, str]) -> Processes | None:
    # OpenMPI and Slurm set PMI variables of the same names for programs of others
    count = environment.get(_tasks_of_slurm(environment) or "")
    if "OMPI_COMM_WORLD_SIZE" in environment or environment.get("PMI_SIZE") == count:
        return None
    return _described(
        environment, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPICH's variables (PMI_RANK)"
    )


def _tasks_of_slurm(environment: Mapping[str, str]) -> str | None:
    """The variable that says how many processes the step of `srun` has; None outside of one."""
    # in a batch script or `salloc` SLURM_JOB_ID is set, and no process of a step: only `srun` starts several
    if environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "batch")) in ("batch", "4294967291"):
        return None
    # the shell of an interactive step of `salloc` is one process, and has SLURM_NTASKS of the allocation
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"


def _of_slurm(environment: Mapping[str, str]) -> Processes | None:
    name = _tasks_of_slurm(environment)
    # on several hosts mpirun starts its daemons by `srun`: Slurm speaks of these, in the environment of all processes
    by_mpi = "OMPI_COMM_WORLD_RANK" in environment or _of_mpich(environment) is not None
    if name is None or by_mpi:
        return None
    return _described(
        environment,
        "SLURM_PROCID",
        name,
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "Slurm's variables",
        environment.get("SLURM_JOB_ID", "") + environment.get("SLURM_STEP_ID", ""),
        lambda: _first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")),
    )


def _described(
    environment: Mapping[str, str],
    index_name: str,
    count_name: str,
    local_index_name: str,
    local_count_name: str,
    source: str,
    job: str | None = None,
    first_host: Callable[[], str] | None = None,
) -> Processes | None:
    """Processes as four variables describe them; None where those of index and number are not set.

    Args:
        environment: the variables.
        index_name: variable of the process's index.
        count_name: variable of the number of processes.
        local_index_name: variable of its index on its host.
        local_count_name: variable of the number of processes on its host.
        source: who sets these variables.
        job: a text that is the same for all processes of a job, and for no other job.
        first_host: what finds the host of process 0 where MASTER_ADDR is not set.
    """
    if index_name not in environment or count_name not in environment:
        return None
    index, count = _number(environment, index_name), _number(environment, count_name)
    if count < 1 or index >= count:
        raise FlowError(
            f"{index_name}={index} and {count_name}={count} describe no process: legal are indices from 0 to "
            f"{count_name} - 1."
        )
    # Slurm's "2(x3),1" is two on each of three hosts, then one
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(local_count_name, ""))
    shares = [int(share) for share, times in found for _ in range(int(times or 1))] or [count]
    node = environment.get("SLURM_NODEID", "0")
    local_count = min(count, shares[int(node) % len(shares)] if node.isdigit() else shares[0])
    local_index = _number(environment, local_index_name) if local_index_name in environment else index % local_count
    host = environment.get("MASTER_ADDR") or (first_host() if first_host else "")
    if not host and local_count < count:
        raise FlowError(
            f"{source} say {count} processes on several hosts, and nothing says where process 0 is: set MASTER_ADDR to "
            "the address of its host and MASTER_PORT to a free port there, on every host."
        )
    return Processes(
        index=index,
        count=count,
        local_index=local_index,
        local_count=local_count,
        hosts=len(shares) if len(shares) > 1 else max(1, count // local_count),
        host=host or LOOPBACK,
        port=_stated_port(environment) or _PORTS[zlib.crc32((job or _starter(index_name)).encode()) % len(_PORTS)],
        source=source,
    )


def _of_tf_config(environment: Mapping[str, str]) -> Processes | None:
    config = tf_config.read(environment)
    if config is None:
        return None
    # a chief is the first worker; an evaluator is no part of the cluster that trains
    jobs = {job: config.cluster.get(job, ()) for job in ("chief", "worker")}
    roles = [(job, number) for job, addresses in jobs.items() for number in range(len(addresses))]
    addresses = [*jobs["chief"], *jobs["worker"]]
    mine = (config.job or "worker", config.index)
    if not config.has_task and len(roles) > 1:
        raise FlowError(f"TF_CONFIG says of no process which of {len(roles)} it is: it has no task; {tf_config.LEGAL}.")
    if mine not in roles:
        workers = ", ".join(f"{job} {number}" for job, number in roles) or "none"
        raise FlowError(
            f"TF_CONFIG says this process is {mine[0]} {mine[1]}, its cluster has {workers}; {tf_config.LEGAL}."
        )
    if any(not re.fullmatch(r".+:\d+", address) for address in addresses):
        raise FlowError(f"TF_CONFIG has workers {addresses}, of which each must be host:port; {tf_config.LEGAL}.")
    place = roles.index(mine)
    hosts = [address.rpartition(":")[0] for address in addresses]
    return Processes(
        index=place,
        count=len(addresses),
        local_index=hosts[:place].count(hosts[place]),
        local_count=hosts.count(hosts[place]),
        hosts=len(set(hosts)),
        host=environment.get("MASTER_ADDR") or hosts[0],
        port=_stated_port(environment) or int(addresses[0].rpartition(":")[2]),
        source="TF_CONFIG",
        addresses=tuple(addresses),
    )


_READERS = (_of_rank, _of_open_mpi, _of_mpich, _of_slurm, _of_tf_config)


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdigit():
        raise FlowError(
            f"the environment variable {name} is {environment[name]!r}; legal is a whole number of at least 0."
        )
    return int(environment[name])


def _stated_port(environment: Mapping[str, str]) -> int | None:
    """The coordinator's port, where MASTER_PORT says it."""
    if not environment.get("MASTER_PORT"):
        return None
    port = _number(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise FlowError(f"the environment variable MASTER_PORT is {port}; legal is 1 to 65535.")
    return port


def _starter(index_name: str) -> str:
    """The number of the process that started all of this host: of mpirun, above a script that wraps the program.

    It is the next one above that was not itself told an index by the variable.
    """
    above = psutil.Process().parents()
    with contextlib.suppress(psutil.Error):  # the environment of another user's
        return str(next((each.pid for each in above if index_name not in each.environ()), 0))
    return str(os.getppid())


def _first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes.

    Example:
        >>> _first_host("gpu[07-09,12],login1"), _first_host("a1,a2")
        ('gpu07', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        return ""
    return match[1] + (match[2] or "") + (match[3] or "")
