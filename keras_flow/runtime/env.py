"""`kf.env`: the ranks and processes of the job, and which of them this process is.

Example:
    >>> import keras_flow as kf
    >>> ranks = kf.init(4)
    >>> kf.env.get_world_size()
    4
    >>> kf.env.is_main_process()  # what is printed or written once, is here
    True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.interface import World
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.current import dry_run
from keras_flow.current.processes import find
from keras_flow.errors import FlowError, warn


def get_world_size() -> int:
    """Number of ranks in all processes."""
    return _world().size


def local_ranks() -> tuple[int, ...]:
    """The ranks that this process drives."""
    return _world().local_ranks


def process_index() -> int:
    """Index of this process among those of the job."""
    return _world().process_index


def process_count() -> int:
    """Number of processes of the job."""
    return _world().process_count


def is_main_process() -> bool:
    """Whether this process is the first of the job: the one that prints, and writes what is written once.

    True on every engine where one process drives all ranks; true on one rank alone where each rank is a process.
    """
    return process_index() == 0


@contextmanager
def main_process_first() -> Iterator[None]:
    """Inside, process 0 goes first and the others after it: it downloads or prepares, they find it done.

    An error in process 0 is raised in all.

    Raises:
        FlowError: process 0 failed, or did not come out within KERAS_FLOW_TIMEOUT.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.env.main_process_first():
        ...     data = [1, 2, 3]  # a download, say
    """
    if process_count() > 1:
        meeting.enter("kf.env.main_process_first()")
    if not is_main_process():
        said = agreement.first_says("")
        if said:
            raise FlowError(f"kf.env.main_process_first: process 0 failed: {said}")
        yield
        return
    try:
        yield
    except BaseException as error:
        if process_count() > 1:
            agreement.first_says(f"{type(error).__name__}: {error}")
        raise
    if process_count() > 1:
        agreement.first_says("")


def init_rdma() -> None:
    """OneFlow's switch. No engine has one: NCCL uses RDMA by itself where a host has it, gloo and gRPC never do."""
    warn(
        "kf.env.init_rdma() changes nothing: NCCL (GPUs) uses RDMA by itself where the hosts have it "
        "(NCCL_IB_DISABLE=1 turns it off); on CPUs gloo and gRPC use TCP."
    )


def rdma_is_initialized() -> bool:
    """False: what uses RDMA is the engine's own affair (`init_rdma`)."""
    return False


def get_rank() -> int:
    """The rank of this process, where it drives one.

    Raises:
        FlowError: this process drives several ranks; a data set sharded by one number would lose rows.
    """
    world = _world()
    if len(world.local_ranks) != 1:
        raise FlowError(
            f"kf.env.get_rank() asks for the one rank of this process, but it drives {len(world.local_ranks)}: "
            f"{list(world.local_ranks)}. Use kf.env.local_ranks(), kf.env.process_index() to tell processes apart, or "
            "kf.env.is_main_process() for what is done once."
        )
    return world.local_ranks[0]


def get_local_rank() -> int:
    """The position of this process's rank among the ranks of its host.

    Raises:
        FlowError: this process drives several ranks.
    """
    get_rank()
    # of a job of one process the variables are leftovers of whatever started that process
    return find().local_index if _world().process_count > 1 else 0


def get_node_size() -> int:
    """Number of hosts of the job."""
    return find().hosts if _world().process_count > 1 else 1


def _world() -> World:
    return dry_run.world() or tensor_engine().world()
