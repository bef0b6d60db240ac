"""Values made sharded: this rank's piece of what one device would draw, without ever holding the whole.

torch's CPU generator is a stream: a tensor drawn in chunks of rows (multiples of 16 elements, the last chunk of at
least 16, because `normal_` fills blocks of 16 and redraws the tail) has the bits of one draw. Each rank walks the
stream and keeps its piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends import logical_random
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.backends.torch import layouts, local_tensors
from keras_flow.current.keras_places import draw_seed
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.keras_places import torch_random as keras_random

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Target:
    """The variable whose value is being drawn."""

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: layouts.TorchPlacements


_target: ContextVar[Target | None] = ContextVar("keras_flow_creation", default=None)


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
    """The value of a new variable, of which this rank draws its piece; None where the whole is needed.

    A user's own initialiser needs it, and Orthogonal; a GPU's generator is no stream.
    """
    # where nothing is split every rank makes the whole value anyway
    if not is_drawn(initializer) or not any(part.is_shard() for part in placements):
        return None
    if logical_random.drawing() is not None:
        slices = layouts.local_slices(shape, mesh, placements)
        local = torch.empty([part.stop - part.start for part in slices], dtype=core.to_torch_dtype(dtype))
        logical_random.draw_block(initializer, shape, dtype)(slices, local)
        return local_tensors.from_local(local.to(core.get_device()), shape, mesh, placements)
    if core.get_device() != "cpu":
        return None
    token = _target.set(Target(shape, mesh, placements))
    try:
        return initializer(shape, dtype=dtype)
    finally:
        _target.reset(token)


def skip(initializer: object) -> None:
    """Let the seed of an initialiser go on as if it had drawn the value of a variable that another rank has."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        draw_seed(seed)


def drawn_variable(*args: object, **kwargs: object) -> Target | None:
    """Condition of hooks on Keras's random functions: the variable whose value is being drawn."""
    return _target.get()


def uniform(
    wanted: Target, original: Callable[..., object], shape: tuple[int, ...], *args: object, **kwargs: object
) -> object:
    """Hook on `random.uniform`: this rank's piece of the draw."""
    return _piece(wanted, original, shape, ("minval", "maxval"), _uniform, args, kwargs)


def normal(
    wanted: Target, original: Callable[..., object], shape: tuple[int, ...], *args: object, **kwargs: object
) -> object:
    """Hook on `random.normal`: this rank's piece of the draw."""
    return _piece(wanted, original, shape, ("mean", "stddev"), _normal, args, kwargs)


def truncated_normal(
    wanted: Target, original: Callable[..., object], shape: tuple[int, ...], *args: object, **kwargs: object
) -> object:
    """Hook on `random.truncated_normal`: this rank's piece of the draw."""
    return _piece(wanted, original, shape, ("mean", "stddev"), _truncated_normal, args, kwargs)


def _piece(
    wanted: Target,
    original: Callable[..., object],
    shape: tuple[int, ...],
    names: tuple[str, str],
    draw: Callable[..., torch.Tensor],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    # an initialiser may draw something else on its way, such as a matrix whose QR it takes
    if tuple(shape) != wanted.shape or not wanted.shape:
        return original(shape, *args, **kwargs)
    # Keras's functions take these positions: (shape, low or mean, high or stddev, dtype, seed)
    given = dict(zip((*names, "dtype", "seed"), args, strict=False), **kwargs)
    low, high = (given.get(name, default) for name, default in zip(names, (0.0, 1.0), strict=True))
    dtype = core.to_torch_dtype(given.get("dtype") or "float32")
    generator = keras_random.torch_seed_generator(given.get("seed"))
    local = _walk(wanted, dtype, lambda size: draw(size, low, high, dtype, generator))
    return local_tensors.from_local(local, wanted.shape, wanted.mesh, wanted.placements)


def _walk(wanted: Target, dtype: torch.dtype, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
    """Draw the whole stream in chunks of rows, and keep this rank's elements."""
    slices = layouts.local_slices(wanted.shape, wanted.mesh, wanted.placements)
    # a chunk is whole rows, so that it is a range of the stream
    rows, inner = wanted.shape[0], math.prod(wanted.shape[1:])
    step = max(1, _CHUNK_ELEMENTS // max(1, inner))
    # `normal_` fills blocks of 16 elements: chunks of whole blocks have the bits of one draw
    step = max(16, step - step % 16)
    starts = list(range(0, rows, step))
    # below 16 elements torch draws by another algorithm: the last chunk takes such a rest along
    if len(starts) > 1 and (rows - starts[-1]) * inner < 16:
        starts.pop()
    out = torch.empty([part.stop - part.start for part in slices], dtype=dtype)
    first, last = slices[0].start, slices[0].stop
    for start, stop in zip(starts, [*starts[1:], rows], strict=True):
        # drawn also where this rank keeps nothing of it: the stream must go on
        piece = draw((stop - start, *wanted.shape[1:]))
        low, high = max(start, first), min(stop, last)
        if low < high:
            out[low - first : high - first] = piece[(slice(low - start, high - start), *slices[1:])]
    return out


# ---- the arithmetic of keras/src/backend/torch/random.py, on a chunk, with a generator that lives across chunks


def _uniform(
    size: tuple[int, ...], low: float, high: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    return (high - low) * torch.rand(size, generator=generator, dtype=dtype) + low


def _normal(
    size: tuple[int, ...], mean: float, stddev: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    return torch.normal(mean, stddev, size=size, generator=generator, dtype=dtype)


def _truncated_normal(
    size: tuple[int, ...], mean: float, stddev: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    # Keras: four draws for each element, of which the first within two deviations is taken
    drawn = torch.normal(0, 1, size=(*size, 4), generator=generator, dtype=dtype)
    inside = ((drawn > -2) & (drawn < 2)).max(-1, keepdim=True)[1]
    return drawn.gather(-1, inside).squeeze(-1).mul_(stddev).add_(mean)
