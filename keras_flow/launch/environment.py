"""Environment variables by which the launcher tells a process who it is, where the others are, what it may use."""

from __future__ import annotations

import os
import random
import socket

from keras_flow import settings
from keras_flow.errors import LaunchError
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.job import Job, Place


def of_process(job: Job, folder: JobFolder, local: int, port: int, attempt: int, token: str) -> dict[str, str]:
    """The environment of process `local` of this host, which finds the others at `port` of the job's host."""
    threads = max(1, (os.cpu_count() or 1) // job.processes)
    place = job.place or Place(local, job.processes, job.node, job.nodes)
    devices = {} if job.devices is None else {settings.DEVICES: str(job.count * job.devices)}
    return {
        "OMP_NUM_THREADS": str(threads),  # the processes share the cores; the user's own value wins
        "PYTHONHASHSEED": "0",  # the same order of sets in every process; the user's own value wins
        **os.environ,
        **job.env,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(job.first + local),
        "LOCAL_RANK": str(place.index),
        "WORLD_SIZE": str(job.count),
        "LOCAL_WORLD_SIZE": str(place.count),
        "GROUP_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(place.hosts),
        "MASTER_ADDR": job.host,
        "MASTER_PORT": str(port),
        **devices,
        settings.TIMEOUT: str(job.timeout),
        **({settings.TOKEN: token} if token else {}),
        settings.RESTARTS: str(attempt),
        settings.JOB: str(folder.path),
    }


#: below the ports that systems hand out by themselves (Linux: from 32768), which another program may get meanwhile
_PORTS = range(20000, 32000)
#: ports that are tried
_TRIED = 100


def free_port() -> int:
    """A port that nobody listens on now; rank 0 does some seconds later, and other jobs on this host choose too."""
    for port in random.SystemRandom().sample(_PORTS, _TRIED):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError as error:
                cause = error
            else:
                return port
    raise LaunchError(
        f"none of {_TRIED} ports of {_PORTS[0]} to {_PORTS[-1]} can be listened at on this host: {cause.strerror}."
    )
