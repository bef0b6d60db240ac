"""Which of a host's accelerators a process takes, where several processes share the host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from keras_flow import settings
from keras_flow.backends.active import checked_name
from keras_flow.backends.engines import ENGINES
from keras_flow.current.processes import INNER, Processes
from keras_flow.errors import FlowError
from keras_flow.units import counted

#: set where a Slurm job asked for so many GPUs for each process; by default it shows each process its own only
_OF_SLURM = "SLURM_GPUS_PER_TASK"
#: what shows a process some of the GPUs
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def cpu_setting() -> str:
    """`NAME=value` of the environment variable that makes the active engine compute on the CPU of a host with GPUs."""
    return ENGINES[checked_name()].on_cpu


def own_accelerators(
    available: int, share: int | None, processes: Processes, environment: Mapping[str, str] | None = None
) -> range:
    """The numbers of a process's accelerators among those that it sees.

    Under keras-flow, torchrun and mpirun every process sees all accelerators of its host: they are assigned by local
    index, `share` to each process. Under Slurm (`--gpus-per-task`), Ray and wrapper scripts a process may see its own
    accelerators only. The local index, modulo what is visible, then selects from those, so that the assignment is also
    right where all of them turn out to be visible.

    Args:
        available: how many this process sees.
        share: how many it takes; None: equally many for each process of the host, and all of its own.
        processes: this process, and the others.
        environment: the variables; None: those of this process.

    Raises:
        FlowError: there are too few.

    Example:
        >>> one = Processes(index=3, count=4, local_index=1, local_count=2, source="RANK and WORLD_SIZE")
        >>> own_accelerators(8, None, one, {}), own_accelerators(8, 1, one, {})
        (range(4, 8), range(1, 2))
    """
    # Slurm tells the number of processes on the first host, where another may have more
    count = max(processes.local_count, processes.local_index + 1)
    are_own = count == 1 or _are_own(available, count, os.environ if environment is None else environment)
    if are_own and (share is None or share >= available):
        return range(available)
    each = share or max(1, available // count)
    if are_own:
        first = processes.local_index * each % available
        return range(first, first + each) if first + each <= available else range(each)
    if each * count > available:
        have = f"{counted(available, 'device')} of type 'gpu'"
        raise FlowError(
            f"the job has {each * count} ranks on this host, which has {have}; a rank needs a device of its own. Ask "
            f"for at most {available}, or compute on the CPU (environment: {cpu_setting()})."
        )
    return range(processes.local_index * each, (processes.local_index + 1) * each)


def _are_own(available: int, count: int, environment: Mapping[str, str]) -> bool:
    """Whether each of `count` processes of a host sees its own accelerators only."""
    if settings.OWN_ACCELERATORS in environment:
        return True
    # those who start all processes of a host with one environment
    if any(name in environment for name in INNER):
        return False
    # a number, or a type and a number: "2", "a100:2"
    asked = environment.get(_OF_SLURM, "").rpartition(":")[2]
    if asked.isdigit() and available < int(asked) * count:
        return True
    return available < count and any(name in environment for name in _VISIBLE)
