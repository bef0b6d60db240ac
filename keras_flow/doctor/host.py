"""Checks of the host, which need no engine: versions, environment, a free port, loopback, shared memory."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet

import keras_flow
from keras_flow import settings
from keras_flow.backends import fingerprints
from keras_flow.backends.engines import ENGINES
from keras_flow.doctor.report import Check
from keras_flow.runtime import versions
from keras_flow.units import amount

#: what `kf.run` and `keras-flow launch` set for the processes they start
SET_BY_LAUNCHER: Mapping[str, str] = {
    "RANK, LOCAL_RANK": "the rank of a process",
    "WORLD_SIZE, LOCAL_WORLD_SIZE": "the number of ranks",
    "MASTER_ADDR, MASTER_PORT": "where the ranks meet",
    "OMP_NUM_THREADS": "the ranks of a host share its cores (your own value wins)",
    "PYTHONHASHSEED": "the same order of sets on every rank (your own value wins)",
    "PYTHONUNBUFFERED": "output comes as it is written",
    settings.DEVICES: "the number of ranks, for kf.init",
    settings.TIMEOUT: "seconds without progress after which a job ends",
    settings.JOB: "the private folder of the job",
}

#: variables of users and engines that change what happens
_RELEVANT = (
    "KERAS_BACKEND",
    "KERAS_HOME",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    *(variable for engine in ENGINES.values() for variable in engine.settings),
    "http_proxy",
    *settings.SETTINGS,
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

#: below this much shared memory NCCL and data loaders with workers are known to fail; Docker's default
_LITTLE_SHM = 64 << 20


def found_versions() -> dict[str, str | None]:
    """keras_flow, Python, Keras and the engines; read without importing them."""
    return {
        "keras-flow": keras_flow.__version__,
        "python": platform.python_version(),
        **{name: versions.installed(name) for name in versions.SUPPORTED},
    }


def describe() -> dict[str, str]:
    """System, cores and memory."""
    return {
        "system": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
        "memory": amount(psutil.virtual_memory().total),
    }


def environment() -> dict[str, str]:
    """The variables of `_RELEVANT` that are set here. Of a proxy and a token the value is hidden: it is a secret."""
    values = {name: os.environ[name] for name in _RELEVANT if name in os.environ}
    return {name: "(set)" if name in ("http_proxy", settings.TOKEN) else value for name, value in values.items()}


def checks() -> list[Check]:
    """All checks of the host."""
    return [keras_version(), free_port(), shared_memory()]


def keras_version() -> Check:
    """Whether Keras is installed, in a supported version; one that came later is a warning."""
    version, supported = versions.installed("keras"), versions.SUPPORTED["keras"]
    if version is None:
        return Check("keras", "failed", f"not installed; pip install 'keras{supported}'")
    if not SpecifierSet(supported).contains(version, prereleases=True):
        return Check("keras", "failed", f"{version} is too old for keras_flow; pip install 'keras{supported}'")
    if version not in (tested := fingerprints.tested("keras")):
        return Check(
            "keras",
            "warning",
            f"{version}, which keras_flow was not tested with ({', '.join(tested)} were): what it wraps is compared "
            "when the first distribution is made, and the self-tests of the engines show whether it works",
        )
    return Check("keras", "ok", version)


def free_port() -> Check:
    """Whether two processes of this host can meet: a free port on 127.0.0.1, and bytes through it."""
    name = "free port, loopback"
    try:
        with socket.socket() as listener:
            listener.settimeout(5)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            port = listener.getsockname()[1]
            # a connection, not only a port: sandboxes let a socket listen and refuse to connect
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sender:
                receiver, _ = listener.accept()
                with receiver:
                    sender.sendall(b"keras-flow")
                    received = receiver.recv(16)
    except OSError as error:
        return Check(
            name,
            "failed",
            f"{error.strerror or error}: the ranks of a job meet at a free port of 127.0.0.1, and none could be used. "
            "Look for processes that hold the ports (`ss -s`), for a narrow net.ipv4.ip_local_port_range, for a "
            "firewall, or for a sandbox without network",
        )
    if received != b"keras-flow":
        return Check(
            name, "failed", f"sent b'keras-flow' to 127.0.0.1:{port}, received {received!r}: something stands between"
        )
    return Check(name, "ok", f"127.0.0.1:{port}")


def shared_memory(path: Path = Path("/dev/shm")) -> Check:
    """Whether there is enough shared memory.

    Containers may have none, which is only a warning: ranks on the CPU do not need it.
    """
    if platform.system() != "Linux":
        return Check("shared memory", "skipped", "only Linux has /dev/shm")
    need = "NCCL (ranks on GPUs) and torch's DataLoader with workers need it"
    cure = "Start the container with --shm-size=1g (Docker), or mount a tmpfs there"
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Check(
            "shared memory", "warning", f"no {path} that can be written: {need}; ranks on the CPU do not. {cure}"
        )
    free = shutil.disk_usage(path).free
    if free <= _LITTLE_SHM:
        return Check("shared memory", "warning", f"{path} has {amount(free)} free: {need}. {cure}")
    return Check("shared memory", "ok", f"{path}, {amount(free)} free")
