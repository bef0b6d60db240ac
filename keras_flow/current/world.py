"""`World`: the ranks of a job, and which of them this process drives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from keras_flow.errors import FlowError


@dataclass(frozen=True)
class World:
    """The ranks of a job as one process sees them.

    Attributes:
        size: number of ranks in all processes.
        type: device type of the ranks, `"cpu"`, `"gpu"` or `"tpu"`.
        local_ranks: the ranks that this process drives.
        process_index: index of this process.
        process_count: number of processes.
        processes: the process of each rank; empty where all drive as many, in order.
        is_simulated: this process plays ranks that are processes of their own on its engine, for looking and learning.
    """

    size: int
    type: str
    local_ranks: tuple[int, ...]
    process_index: int = 0
    process_count: int = 1
    processes: tuple[int, ...] = field(default=(), repr=False)
    is_simulated: bool = field(default=False, repr=False)

    @property
    def is_in_one_process(self) -> bool:
        """Whether this process drives all ranks."""
        return len(self.local_ranks) == self.size

    def process_of(self, rank: int) -> int:
        """The process that drives a rank."""
        return self.processes[rank] if self.processes else rank * self.process_count // self.size

    def first_of_each_process(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The first of some ranks in each process that drives any of them, in the order of processes."""
        found: dict[int, int] = {}
        for rank in ranks:
            found.setdefault(self.process_of(rank), rank)
        return tuple(found[process] for process in sorted(found))

    def require_real(self, what: str) -> None:
        """Refuse what simulated ranks cannot do.

        Args:
            what: a subject of "needs".

        Raises:
            FlowError: the ranks are simulated.
        """
        if self.is_simulated:
            raise FlowError(
                f"{what} needs ranks that are processes, and kf.init({self.size}, simulate=True) plays them in this "
                "one: global tensors, boxing, kf.comm and pictures work so, distributions and DTensors do not. Start "
                f"ranks with kf.notebook.start({self.size}) in a notebook, kf.run(main, devices={self.size}) or "
                f"`keras-flow launch --devices {self.size} script.py`."
            )
