"""Texts to submit to a cluster: a script for Slurm, one for mpirun, a manifest for Kubernetes.

On Slurm and Kubernetes each host has a launcher of ours, which ends, names and restarts as anywhere. mpirun is a
launcher itself: its processes find their place by its variables.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from keras_flow import settings
from keras_flow.errors import FlowError
from keras_flow.launch.processes import preemption_seconds

#: where the launchers of several hosts meet, unless the user says so
DEFAULT_PORT = 29500
#: a host's index and the address of the first one, in Slurm's script
_VARIABLES = ("$SLURM_NODEID", "$MASTER_ADDR")
#: seconds that a launcher takes to end once its processes have had theirs
_ENDING_SECONDS = 10


@dataclass(frozen=True)
class Submission:
    """A job to be submitted.

    Attributes:
        engine: Keras's name of the backend.
        program: the script or module and its arguments, after the options of `keras-flow launch`.
        is_module: whether the program is a module's name.
        nodes: number of hosts.
        processes: processes on each host.
        devices: ranks of each process; None: as many as its engine finds.
        port: free port of the first host.
        timeout: seconds without progress after which the job ends.
        restarts: how often all processes start again after a failure.
        image: container image, for Kubernetes.
        output: options of `keras-flow launch` that say where output goes.
    """

    engine: str
    program: Sequence[str]
    is_module: bool
    nodes: int
    processes: int
    devices: int | None
    port: int
    timeout: float
    restarts: int
    image: str
    output: Sequence[str] = ()

    @property
    def name(self) -> str:
        """A name that every system takes: of the program, in small letters, digits and hyphens."""
        stem = PurePath(self.program[0]).stem if not self.is_module else self.program[0]
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
        return name if name[:1].isalpha() else f"job-{name}".strip("-")  # a service of Kubernetes begins with a letter

    def command(self, node: str, address: str) -> list[str]:
        """The launcher of a host.

        Args:
            node: index of the host, perhaps as a variable of whoever runs it.
            address: the address of host 0.
        """
        options = {
            "--nnodes": self.nodes,
            "--node_rank": node,
            "--nproc_per_node": self.processes,
            "--devices_per_proc": self.devices,
            "--master_addr": address,
            "--master_port": self.port,
            "--timeout": f"{self.timeout:g}",
            "--max_restarts": self.restarts or None,
        }
        given = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
        module = ["-m"] if self.is_module else []
        return ["python", "-m", "keras_flow.launch", *given, *self.output, *module, *self.program]


def slurm(job: Submission) -> str:
    """A batch script for `sbatch`: one task on each host, which is a launcher.

    Example:
        >>> job = Submission("jax", ("train.py",), False, 2, 4, None, 29500, 1800.0, 0, "")
        >>> print(slurm(job).splitlines()[2])
        #SBATCH --nodes=2
    """
    launcher = _words(job.command(*_VARIABLES))
    gpus = job.processes * (job.devices or 1)
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output={job.name}-%j.log
# add what your cluster asks for: --partition, --account, --time, --cpus-per-task, --gpus-per-node={gpus}

{_exports({"KERAS_BACKEND": job.engine, **settings.given()})}
# the secret of this job, by which its hosts know each other; srun passes it on in the environment
export {settings.TOKEN}="$(python -c 'import secrets; print(secrets.token_hex(32))')"
# from Slurm 22.05 on srun takes no --cpus-per-task from sbatch
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# every host: one launcher, which starts {job.processes} process{"es" if job.processes > 1 else ""}
srun --kill-on-bad-exit=0 bash -c {shlex.quote(launcher)}
"""


def mpirun(job: Submission) -> str:
    """A shell script that calls OpenMPI's mpirun: one process for each slot.

    Example:
        >>> job = Submission("torch", ("train.py",), False, 2, 4, None, 29500, 1800.0, 0, "")
        >>> print(mpirun(job).splitlines()[-1])
          python train.py

    Raises:
        FlowError: restarts or files for output are asked for, which are the launcher's.
    """
    if job.restarts or job.output:
        lacks = (
            "--max_restarts: mpirun starts no process again" if job.restarts else f"{job.output[0]}: mpirun has its own"
        )
        raise FlowError(
            f"--print-mpirun has no {lacks}. Leave it out, or take --print-slurm or --print-k8s, whose hosts have "
            "launchers of keras-flow."
        )
    # what a script is called is not known here: `init` and a redirection give it a name
    several = "usage: sh $0 HOST0,HOST1,..."
    first = f". {several}\nset -eu\nhosts=${{1:?{several}}}" if job.nodes > 1 else "\nset -eu\nhosts=${1:-localhost}"
    count = job.nodes * job.processes
    variables = {"KERAS_BACKEND": job.engine, "MASTER_PORT": str(job.port)}
    variables |= {**settings.given(), settings.TIMEOUT: f"{job.timeout:g}"}
    if job.devices is not None:
        variables[settings.DEVICES] = str(count * job.devices)
    names = ["MASTER_ADDR", settings.TOKEN, *variables]
    program = _words(["python", *(["-m"] if job.is_module else []), *job.program])
    return f"""#!/bin/sh
# {job.processes} processes on each of {job.nodes} hosts{first}
export MASTER_ADDR="${{hosts%%,*}}"
export {settings.TOKEN}="$(python -c 'import secrets; print(secrets.token_hex(32))')"
{_exports(variables)}

# OpenMPI. MPICH: mpiexec -n {count} -ppn {job.processes} -hosts "$hosts" -genvlist {",".join(names)}
mpirun -n {count} --map-by ppr:{job.processes}:node \\
  --host "$(echo "$hosts" | sed 's/,/:{job.processes},/g'):{job.processes}" \\
  {" ".join(f"-x {name}" for name in names)} \\
  {program}
"""


def k8s(job: Submission) -> str:
    """A manifest of a JobSet (jobset.x-k8s.io/v1alpha2) for `kubectl apply`: one pod for each host.

    Example:
        >>> job = Submission("jax", ("train.py",), False, 2, 4, None, 29500, 1800.0, 0, "registry/image:1")
        >>> print(k8s(job).splitlines()[3])
        kind: JobSet
    """
    grace = math.ceil(preemption_seconds()) + _ENDING_SECONDS
    variables = {"KERAS_BACKEND": job.engine, **settings.given()}
    environment = ("\n" + 20 * " ").join(
        f"- name: {name}\n{22 * ' '}value: {json.dumps(value)}" for name, value in variables.items()
    )
    literal = replace(job, program=[word.replace("$(", "$$(") for word in job.program])  # else Kubernetes' variables
    command = literal.command("$(JOB_COMPLETION_INDEX)", f"{job.name}-host-0-0.{job.name}")
    return f"""# the secret by which the hosts know each other, made once:
#   kubectl create secret generic {job.name}-token --from-literal=token="$(openssl rand -hex 32)"
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  # the launchers restart processes (--max_restarts); a pod that is lost ends the job
  failurePolicy:
    maxRestarts: 0
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  replicatedJobs:
    - name: host
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {job.nodes}
          parallelism: {job.nodes}
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              # for a callback of kf.on_preemption (KERAS_FLOW_GRACE)
              terminationGracePeriodSeconds: {grace}
              containers:
                - name: launcher
                  image: {json.dumps(job.image or "IMAGE")}
                  command: {json.dumps(command)}
                  env:
                    {environment}
                    - name: {settings.TOKEN}
                      valueFrom:
                        secretKeyRef:
                          name: {job.name}-token
                          key: token
                  ports:
                    - containerPort: {job.port}
                      protocol: TCP
"""


#: option of `keras-flow launch` -> what writes it
SYSTEMS = {"--print-slurm": slurm, "--print-k8s": k8s, "--print-mpirun": mpirun}


def _exports(variables: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def _words(command: Sequence[str]) -> str:
    """A command line for a shell; our variables stay variables."""
    return " ".join(f'"{word}"' if word in _VARIABLES else shlex.quote(word) for word in command)
