"""A Slurm of two nodes on this machine: slurm-wlm and munge of Debian, started in a folder of its own and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_flow.launch.environment import free_port

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr={host} Port={first} CPUs=2
NodeName=zz-second NodeHostname=zz-second NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start it; the environment variables by which its commands find it."""
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm of two nodes needs root and Debian's slurm-wlm and munge (missing: {missing})")
    host = socket.gethostname()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIGURATION.format(host=host, folder=folder, controller=free_port(), first=free_port(), second=free_port())
    )
    for name in ("state", "spool-zz-second", f"spool-{host}"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    where = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    environment = {**os.environ, **where}
    munge = [f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "zz-second"],
        ["slurmd", "-D", "-N", host],
    ]
    started = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            time.sleep(0.5)
        _wait_until_idle(environment, folder)
        yield where
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait(10)


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    until = time.monotonic() + 40
    while True:
        states = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"], env=environment, capture_output=True, text=True, check=False
        )
        if states.stdout.split() == ["idle", "idle"]:
            return
        logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))
        assert time.monotonic() < until, f"{states.stdout}{states.stderr}\n{logs}"
        time.sleep(0.5)
