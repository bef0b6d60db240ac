"""What global tensors ask of the active backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.placements import Placement
    from keras_flow.tensors.global_tensor import GlobalTensor


def local_ranks() -> tuple[int, ...]:
    """The ranks that this process drives."""
    return tensor_engine().world().local_ranks


def world_size() -> int:
    """Number of ranks of the job."""
    return tensor_engine().world().size


def check_placement(placement: Placement) -> None:
    """Raises FlowError where a placement names ranks or a type that the job does not have."""
    world = tensor_engine().world()
    outside = [rank for rank in placement.ranks if rank >= world.size]
    if outside:
        raise FlowError(
            f"{placement} names ranks {outside}; the job has {world.size}, 0 to {world.size - 1}. Start it with more: "
            f"kf.init({max(outside) + 1}), kf.run(main, devices={max(outside) + 1})"
        )
    if placement.type not in (None, world.type):
        raise FlowError(f"{placement} is of type {placement.type!r}; the job's ranks are of type {world.type!r}")


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of that name; bfloat16 included where `ml_dtypes` is there."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def put(value: np.ndarray, rank: int) -> Any:
    """The engine's array on the device of a rank of this process."""
    return tensor_engine().put(value, rank)


def as_numpy(value: Any) -> np.ndarray:
    """A numpy array of the engine's."""
    return tensor_engine().as_numpy(value)


def to_engine(tensor: GlobalTensor) -> Any:
    """The engine's own distributed array."""
    return tensor_engine().to_engine(tensor.layout, tensor._shards)


def on_rank(rank: int) -> AbstractContextManager[object]:
    """Inside, operators compute on the device of a rank."""
    return tensor_engine().on_rank(rank)


def check_dtype(value: Any, wanted: str) -> None:
    """Raises FlowError where the engine made another dtype of it."""
    import keras

    found = keras.backend.standardize_dtype(value.dtype)
    if found != wanted:
        raise FlowError(
            f"the {tensor_engine().name} backend made {found} of {wanted}; ask for dtype={found!r}, or let the engine "
            "have 64 bits (JAX: jax.config.update('jax_enable_x64', True))"
        )
