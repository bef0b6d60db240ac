"""Randomness on PyTorch: all ranks draw what one device would draw for the logical tensor, and take their part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from keras_flow import philox
from keras_flow.backends import logical_random
from keras_flow.backends.engine_records import RandomPart
from keras_flow.backends.hooking import hook
from keras_flow.backends.torch import device_draws, layouts, local_tensors, step
from keras_flow.backends.torch.step import OwnRows, RunningStep, computing, current_step
from keras_flow.backends.torch.variables import from_logical, to_logical
from keras_flow.current.keras_places import engine_core as core


@hook(
    "keras:random",
    "dropout",
    "one mask for the logical tensor; without it ranks repeat the mask of their rows",
    when=step.running_step,
)
def dropout(
    step: RunningStep,
    original: Callable[..., torch.Tensor],
    inputs: torch.Tensor,
    rate: float,
    noise_shape: tuple[int | None, ...] | None = None,
    seed: object = None,
) -> torch.Tensor:
    """Hook on `random.dropout`: the mask of one device, of which this rank takes its part.

    Unseeded layers draw from torch's own generator, so a mask of the local shape would be another one.
    """
    if not 0.0 < rate < 1.0:
        return original(inputs, rate, noise_shape, seed)
    if isinstance(inputs, DTensor):
        mask = original(
            torch.ones(tuple(inputs.shape), dtype=inputs.dtype, device=inputs.device), rate, noise_shape, seed
        )
        placements = tuple(part if part.is_shard() else Replicate() for part in inputs.placements)
        return inputs * from_logical(mask, inputs.device_mesh, placements)
    if step.inside is None:
        return original(inputs, rate, noise_shape, seed)
    # the mask of all rows, of which this rank takes its own
    shape = (step.inside.logical(inputs.shape[0]), *inputs.shape[1:])
    own = int(inputs.shape[0])
    if noise_shape is not None and noise_shape[0] == own and not logical_random.has_one_mask(noise_shape, own):
        noise_shape = (shape[0], *noise_shape[1:])
    mask = original(torch.ones(shape, dtype=inputs.dtype, device=inputs.device), rate, noise_shape, seed)
    return inputs * mask[step.inside.own(shape[0])]


@hook(
    "keras:random",
    ("normal", "uniform", "truncated_normal", "randint"),
    "noise for all rows, of which a rank takes its own",
    when=step.step_by_rows,
)
def draw(
    step: RunningStep, original: Callable[..., torch.Tensor], shape: tuple[int, ...], *args: object, **kwargs: object
) -> object:
    """Hook on `random.normal` and the like, inside a layer that computes this rank's rows.

    Draws for all rows, and keeps this rank's. The layers that are known to act row by row draw tensors of their input's
    rows only.
    """
    rows = cast("OwnRows", step.inside)  # a layer computes this rank's rows
    # one number for all rows
    if not len(shape):
        return original(shape, *args, **kwargs)
    with computing(step, None):  # a draw may be made of another (truncated_normal)
        value = original((rows.logical(int(shape[0])), *shape[1:]), *args, **kwargs)
    return value[rows.own(value.shape[0])]


# ---- random="logical"


def random_part(
    shape: tuple[int, ...], inputs: torch.Tensor | None, noise_shape: Sequence[int | None] | None, is_whole: bool
) -> RandomPart | None:
    """Which elements of a draw this rank makes: its rows where it computes these alone, its block of a mask."""
    if not logical_random.has_known_lengths(shape):
        return None  # tensors have shapes: this is a program being compiled
    step = current_step()
    if isinstance(inputs, DTensor):
        return _part_of_mask(shape, inputs)
    if step is None or step.inside is None or is_whole or not shape:
        return RandomPart.whole(shape)
    rows, own = step.inside, int(shape[0] if inputs is None else inputs.shape[0])
    logical = rows.logical(own)
    # a noise shape may name the rows of the whole batch, or 1 for one mask for all
    if inputs is not None and (shape[0] not in (own, logical) or logical_random.has_one_mask(noise_shape, own)):
        return RandomPart.whole(shape)
    inner = shape[1:]
    return RandomPart((logical, *inner), (rows.own(logical), *(slice(0, length) for length in inner)))


def _part_of_mask(shape: tuple[int, ...], inputs: DTensor) -> RandomPart:
    """The block of a mask for this rank's block of a distributed tensor; a dim of length 1 is not split."""
    mesh = inputs.device_mesh
    placements = tuple(
        part if isinstance(part, Shard) and shape[part.dim] == inputs.shape[part.dim] else Replicate()
        for part in inputs.placements
    )
    slices = layouts.local_slices(shape, mesh, placements)
    return RandomPart(shape, slices, lambda values: local_tensors.from_local(values, shape, mesh, placements))


def random_words(state: torch.Tensor) -> tuple[device_draws.Word, device_draws.Word]:
    """The two 32-bit words of a seed; on a GPU they stay there, since who reads a number waits for all before it."""
    logical = to_logical(state)
    if _on_host():
        first, second = (int(word) & 0xFFFFFFFF for word in logical.tolist())
    else:
        first, second = logical.to(torch.int64) & 0xFFFFFFFF
    return first, second


def random_fractions(words: tuple[Any, Any], tag: int, part: RandomPart) -> torch.Tensor:
    """`philox.fractions` of the elements of a part: float32."""
    seed = words[0] | tag << 32
    if _on_host():
        compiled = not logical_random.makes_variable()
        return _as_tensor(philox.fractions(seed, words[1], part.shape, part.slices, compiled))
    return device_draws.fractions(core.get_device(), (seed, words[1]), part.shape, part.slices)


def random_offsets(words: tuple[Any, Any], part: RandomPart, span: int) -> torch.Tensor:
    """`philox.offsets` of the elements of a part: int32."""
    if _on_host():
        return _as_tensor(philox.offsets(*words, part.shape, part.slices, span, compiled=True))
    return device_draws.offsets(core.get_device(), words, part.shape, part.slices, span)


def _on_host() -> bool:
    return torch.device(core.get_device()).type == "cpu"


def _as_tensor(drawn: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(drawn, order="C"))


def reorder(x: torch.Tensor, keys: torch.Tensor, axis: int) -> torch.Tensor:
    """`x` with its entries along an axis in the order of `keys` [length]."""
    return torch.index_select(x, axis, torch.argsort(keys, stable=True))
