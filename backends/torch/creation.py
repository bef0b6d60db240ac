"""Values of new variables, of which a rank makes its piece: `random="logical"` draws any block of them alone."""

from __future__ import annotations

from collections.abc import Callable

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.backends.torch import layouts, local_tensors
from keras_flow.current.keras_places import draw_seed
from keras_flow.current.keras_places import engine_core as core


def constant(
    initializer: object, shape: tuple[int, ...], dtype: str, mesh: DeviceMesh, placements: layouts.TorchPlacements
) -> DTensor | None:
    """The value of a new variable whose elements are all the same; None for other initialisers."""
    value = constant_of(initializer)
    if value is None:
        return None
    # no draw and no whole value: every element is known
    local = [part.stop - part.start for part in layouts.local_slices(shape, mesh, placements)]
    piece = torch.full(local, value, dtype=core.to_torch_dtype(dtype), device=core.get_device())
    return local_tensors.from_local(piece, shape, mesh, placements)


def drawn(
    initializer: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    dtype: str,
    mesh: DeviceMesh,
    placements: layouts.TorchPlacements,
) -> torch.Tensor | None:
    """The value of a new variable, of which this rank draws its piece; None where the whole is made and cut.

    That is a stock draw, and what a user's own initialiser makes, or Orthogonal.
    """
    # where nothing is split every rank makes the whole value anyway
    if not is_drawn(initializer) or not any(part.is_shard() for part in placements):
        return None
    if logical_random.drawing() is None:
        return None
    slices = layouts.local_slices(shape, mesh, placements)
    local = torch.empty([part.stop - part.start for part in slices], dtype=core.to_torch_dtype(dtype))
    logical_random.draw_block(initializer, shape, dtype)(slices, local)
    return local_tensors.from_local(local.to(core.get_device()), shape, mesh, placements)


def skip(initializer: object) -> None:
    """Let the seed of an initialiser go on as if it had drawn the value of a variable that another rank has."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        draw_seed(seed)
