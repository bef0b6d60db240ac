"""The ranks of the job, as global tensors see them."""

from __future__ import annotations

from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError
from keras_flow.placements import Placement


def local_ranks() -> tuple[int, ...]:
    """The ranks that this process drives: all of them on JAX and TensorFlow, one on torch."""
    return tensor_engine().world().local_ranks


def world_size() -> int:
    """Number of ranks of the job."""
    return tensor_engine().world().size


def check_placement(placement: Placement) -> None:
    """Check that the job has the ranks of a placement.

    Raises:
        FlowError: the placement names ranks, or a device type, that the job does not have.
    """
    world = tensor_engine().world()
    outside = [rank for rank in placement.ranks if rank >= world.size]
    if outside:
        raise FlowError(
            f"{placement} names ranks {outside}; the job has {world.size}, 0 to {world.size - 1}. Start it with more: "
            f"kf.init({max(outside) + 1}), kf.run(main, devices={max(outside) + 1})"
        )
    if placement.type not in (None, world.type):
        raise FlowError(f"{placement} is of type {placement.type!r}; the job's ranks are of type {world.type!r}")
