"""Who is here: `init`, `rank`, `size`, and sets of processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from keras_flow import comm
from keras_flow.backends import random_states
from keras_flow.backends.active import announced_devices, backend, tensor_engine
from keras_flow.current.processes import Processes, find
from keras_flow.errors import FlowError
from keras_flow.placements import Placement
from keras_flow.runtime.init import init as init_ranks

#: the place on its host, and how many are there, of each process, once `init` was called
_places: tuple[tuple[int, int], ...] = ()


def init(process_sets: str | Iterable[ProcessSet | Iterable[int]] | None = None) -> None:
    """Join the processes of the job, each of which is a rank with data of its own.

    Args:
        process_sets: sets that the program will use; they may also be made later. Horovod's `"dynamic"` says that they
            will be.

    Raises:
        FlowError: this process drives several ranks.

    Example:
        >>> import keras_flow.hvd as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)
    """
    global _places
    alone = find().count == 1 and announced_devices() is None
    # kf.init makes random states alike, for rows of one batch; here each rank shuffles and drops by itself
    states = random_states.states()
    world = init_ranks(1 if alone else None)
    random_states.set_states(states)
    if len(world.local_ranks) != 1:
        raise FlowError(
            f"keras_flow.hvd: a process is a rank, and this one drives ranks {list(world.local_ranks)}. Start one for "
            f"each: keras-flow launch --nproc_per_node {len(world.local_ranks)} SCRIPT.py"
        )
    if world.size > 1 and world.local_ranks[0] == 0 and not _places:
        print(
            f"keras_flow.hvd: {world.size} ranks; batch_size counts the rows of one rank, of the data that it is given "
            "(under kf.DataParallel: of the batch of all ranks)",
            file=sys.stderr,
        )
    here = _here()
    _places = _places or ((here.local_index, here.local_count),)
    if len(_places) < world.size:
        engine = tensor_engine()
        told = comm.all_gather_into_tensor(engine.put(np.array(_places, "int32"), world.local_ranks[0]))
        _places = tuple((int(place), int(count)) for place, count in engine.as_numpy(told))
    # a text names no set: they may be made at any time, as "dynamic" asks for
    for each in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(each)


def shutdown() -> None:
    """End the use of hvd; processes stay joined until they end."""
    global _places
    _places = ()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return bool(_places)


def rank() -> int:
    """The rank of this process."""
    return _asked("rank").index


def size() -> int:
    """The number of processes."""
    return _asked("size").count


def local_rank() -> int:
    """The position of this process on its host."""
    return _asked("local_rank").local_index


def local_size() -> int:
    """The number of processes on this host."""
    return _asked("local_size").local_count


def cross_rank() -> int:
    """The position of this host among those that have a process of this local rank."""
    here = _asked("cross_rank")
    return sum(place == here.local_index for place, _ in _places[: here.index])


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    here = _asked("cross_size")
    return sum(place == here.local_index for place, _ in _places)


def is_homogeneous() -> bool:
    """Whether all hosts have as many processes."""
    _asked("is_homogeneous")
    return len({count for _, count in _places}) == 1


def _asked(name: str) -> Processes:
    if not _places:
        raise FlowError(f"hvd.{name}: keras_flow.hvd is not initialized; call hvd.init() first")
    return _here()


def _here() -> Processes:
    here = find()
    # of a job of one process the variables are leftovers of whatever started that process
    return here if here.count > 1 else Processes()


class ProcessSet:
    """Some of the processes, for collectives among them alone.

    Args:
        ranks: the ranks of these processes.

    Example:
        >>> import keras_flow.hvd as hvd
        >>> hvd.init()
        >>> hvd.ProcessSet([0]).included()
        True
    """

    def __init__(self, ranks: Iterable[int]):
        self.ranks: list[int] = sorted(set(ranks))
        if not self.ranks or min(self.ranks) < 0:
            raise FlowError(f"hvd.ProcessSet({self.ranks}): legal are one or more ranks, from 0 up")

    def included(self) -> bool:
        """Whether this process is in it."""
        return rank() in self.ranks

    def rank(self) -> int:
        """The position of this process in it.

        Raises:
            FlowError: it is not in it.
        """
        if not self.included():
            raise FlowError(f"hvd: rank {rank()} is not in the process set {self.ranks}")
        return self.ranks.index(rank())

    def size(self) -> int:
        """The number of its processes."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


class _All(ProcessSet):
    """All processes, however many there will be."""

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(size()))


#: all processes
global_process_set: ProcessSet = _All()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Check a set of processes; it needs no registration.

    Raises:
        FlowError: it has ranks that the job has not.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if outside := [each for each in found.ranks if each >= size()]:
        raise FlowError(f"hvd.add_process_set: ranks {outside} are not in the job, which has 0 to {size() - 1}")
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set: nothing is kept of it."""
    return process_set is not global_process_set


def group_of(process_set: ProcessSet) -> Placement | None:
    """The placement of a set; None for all.

    Raises:
        FlowError: this process is not in it.
    """
    if process_set.size() == size():
        return None
    process_set.rank()
    return Placement(process_set.ranks, type=backend().world().type)
