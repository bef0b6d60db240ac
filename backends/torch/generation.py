"""Generation on PyTorch: one step of the consistent view. A cache gets the layout of what is written into it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from keras_flow.backends import leaves
from keras_flow.backends.hooking import hook
from keras_flow.backends.torch import data, layouts, local_tensors, variables
from keras_flow.backends.torch.step import RunningStep, current_step, running

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution

#: torch's words for a tensor of shape [1] that counts as replicated, as all plain tensors in a step do
_OF_ONE_NUMBER = "Found a non-scalar tensor with numel=1"


def generate_function(
    model: keras.Model, distribution: Distribution, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A model's function on DTensors: rows over the data ranks where they divide; logical tensors in and out."""

    def generate(*args: object, **kwargs: object) -> object:
        if not layouts.distributed(distribution.placement):
            return function(*args, **kwargs)

        def convert(leaf: object) -> object:
            # settings, such as tokens that end a text, are no tensors and stay what they are
            return data.to_tensors(leaf) if hasattr(leaf, "__array__") else leaf

        args, kwargs = data.map_call(convert, args, kwargs)
        held, step = variables.viewed(model.variables, consistent=True), RunningStep(distribution, consistent=True)
        with held, running(step), warnings.catch_warnings():
            warnings.filterwarnings("ignore", _OF_ONE_NUMBER)
            args, kwargs = data.put_batch((args, kwargs), distribution)  # type: ignore[misc]
            return leaves.mapped(variables.to_logical, function(*args, **kwargs))

    return generate


def updated_on_mesh(inputs: object, start_indices: object, updates: object) -> DTensor | None:
    """Condition of the hook on `slice_update`: the operand that says where the result's dims lie, in a step."""
    step = current_step()
    if step is None or not step.consistent or step.inside is not None:
        return None
    return updates if isinstance(updates, DTensor) else inputs if isinstance(inputs, DTensor) else None


@hook(
    "keras:core",
    "slice_update",
    "a cache of keys and values, made of zeros, would hold all rows and heads on every rank",
    when=updated_on_mesh,
)
def slice_update(
    laid: DTensor,
    original: Callable[..., torch.Tensor],
    inputs: torch.Tensor,
    start_indices: Sequence[int | torch.Tensor],
    updates: torch.Tensor,
) -> torch.Tensor:
    """Hook on `slice_update`: a cache that is made whole takes the layout of what is written into it.

    A dim stays split where the update covers all of it; each rank then writes its own piece.
    """
    mesh = laid.device_mesh
    placements = tuple(
        part if isinstance(part, Shard) and inputs.shape[part.dim] == updates.shape[part.dim] else Replicate()
        for part in laid.placements
    )
    starts = [variables.to_logical(start) for start in start_indices]

    def piece(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value[layouts.local_slices(value.shape, mesh, placements)] if value.ndim else value
        return local_tensors.to_local(value if value.placements == placements else value.redistribute(mesh, placements))

    result = original(piece(inputs), starts, piece(updates))
    return local_tensors.from_local(result, inputs.shape, mesh, placements)
