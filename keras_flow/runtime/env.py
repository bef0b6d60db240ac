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

import os

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.interface import World
from keras_flow.errors import FlowError


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
    rank = get_rank()
    # of a job of one process the variable is a leftover of whatever started that process
    named = os.environ.get("LOCAL_RANK")
    return int(named) if named is not None and _world().process_count > 1 else rank % _ranks_per_node()


def get_node_size() -> int:
    """Number of hosts of the job."""
    return max(1, _world().size // _ranks_per_node())


def _ranks_per_node() -> int:
    world = _world()
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here is not None and world.process_count > 1:
        return int(here)
    # without a launcher's word every process of an engine that drives all ranks of a host is a host
    return len(world.local_ranks)


def _world() -> World:
    return tensor_engine().world()
