"""Checks of a placement: whether it is one, and whether a job has its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_flow.errors import FlowError
from keras_flow.placements import Placement

if TYPE_CHECKING:
    from keras_flow.backends.interface import Backend
    from keras_flow.current.world import World


def require_placement(placement: object, who: str) -> None:
    """Refuse what is no placement.

    Raises:
        FlowError: it is a number, a list, or a placement of another library.
    """
    if not isinstance(placement, Placement):
        count = placement if isinstance(placement, int) else 4
        raise FlowError(
            f"kf.{who} takes a kf.Placement, got {placement!r}; for example kf.{who}(kf.Placement(range({count})))"
        )


def check_ranks(placement: Placement, world: World, engine: Backend, is_of_all_processes: bool) -> None:
    """Refuse a placement whose type or ranks a job does not have, or that leaves a process without work.

    Raises:
        FlowError: it is such a placement.
    """
    size, type = world.size, world.type
    if placement.type != type:
        raise FlowError(
            f"the placement is of type {placement.type!r}, this job runs on {type!r} devices: "
            f"leave the type out, or start with kf.init(type={placement.type!r}) where such devices exist"
        )
    # the largest rank counts and not their number: a placement may leave ranks out
    if max(placement.ranks) >= size:
        need = max(placement.ranks) + 1
        raise FlowError(
            f"the placement needs ranks up to {max(placement.ranks)}, {engine.name} has {size} "
            f"({'rank 0' if size == 1 else f'ranks 0 to {size - 1}'}). Start the program with "
            f"kf.run(main, devices={need}) or `keras-flow launch --devices {need} script.py`"
            + (
                f", or call kf.init(devices={need}) before any layer or tensor is made"
                if engine.capabilities.drives_all_ranks
                else ""
            )
        )
    if not (engine.capabilities.drives_all_ranks and is_of_all_processes):
        return
    # a process of these engines takes part in a step by its devices, or not at all
    taking_part = {world.process_of(rank) for rank in placement.ranks}
    if len(taking_part) < world.process_count:
        without = next(rank for rank in range(size) if world.process_of(rank) not in taking_part)
        raise FlowError(
            f"no rank of the placement {list(placement.ranks)} is of the process that drives rank {without}. On "
            f"{engine.name} each process of a job takes part in every step: name a rank of each, or start one process, "
            f"`keras-flow launch --nproc_per_node 1 --devices_per_proc {size} script.py`"
        )
