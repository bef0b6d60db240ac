"""`World`: the ranks of a job, and which of them this process drives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The ranks of a job as one process sees them.

    Attributes:
        size: number of ranks in all processes.
        type: device type of the ranks, `"cpu"`, `"gpu"` or `"tpu"`.
        local_ranks: the ranks that this process drives.
        process_index: index of this process.
        process_count: number of processes.
    """

    size: int
    type: str
    local_ranks: tuple[int, ...]
    process_index: int = 0
    process_count: int = 1
