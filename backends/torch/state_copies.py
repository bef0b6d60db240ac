"""Finds ranks whose copies of a state differ after their first steps: `backends.copies` compares before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_distributed
from torch.distributed.tensor import DTensor

from keras_flow.backends import states
from keras_flow.backends.torch import layouts
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

    from keras_flow.placements import Placement


def compare(model: keras.Model, placement: Placement) -> None:
    """Check that the state which a step has assigned is equal on all ranks. A collective of the placement's ranks.

    It differs where a layer computed it from the rows of a rank alone, and was believed to act row by row.

    Raises:
        FlowError: on all ranks of the placement, naming the first variable, its layer and the ranks.
    """
    state = states.assigned_by_calls(model)
    differing = _differing([variable for variable, _ in state], placement)
    if differing:
        first = differing[0]
        layer = next(layer for variable, layer in state if variable is first)
        group = layouts.group(placement.ranks)  # ranks outside of the placement do not come here
        own = torch.tensor([_sum_of_bits(first._value)])
        found = [torch.zeros_like(own) for _ in range(placement.size)]
        torch_distributed.all_gather(found, own, group=group)
        sums = dict(zip(torch_distributed.get_process_group_ranks(group), map(int, found), strict=True))
        raise FlowError(states.explained(first, layer, sums, len(differing) - 1))


def _differing(variables: Sequence[keras.Variable], placement: Placement) -> list[keras.Variable]:
    """The variables of which ranks hold different copies.

    Each rank sums the bits of its part. Along each axis on which a variable is broadcast, the least and the greatest
    sum must be equal: one all-reduce of two numbers a variable for each axis, whatever the number of ranks.
    """
    mesh = layouts.mesh(placement)
    variables = [variable for variable in variables if variable._value is not None]
    if not variables:
        return []
    differ = torch.zeros(len(variables), dtype=torch.int64)
    for axis in range(mesh.ndim):
        # a sum of bits, not of values: nan equals itself, and -0.0 differs from 0.0
        sums = torch.tensor([_sum_of_bits(v._value) if _is_copied(v._value, axis) else 0 for v in variables])
        differ |= differ_between(sums, mesh.get_group(axis)).to(torch.int64)
    differ = _greatest(differ, layouts.group(placement.ranks))
    return [variable for variable, is_other in zip(variables, differ.tolist(), strict=True) if is_other]


def differ_between(numbers: torch.Tensor, group: torch_distributed.ProcessGroup | None = None) -> torch.Tensor:
    """Which of some int64 numbers are not equal on all ranks of a group (None: of the job). A collective of it."""
    # the greatest of the negatives is the least: one all-reduce finds both
    greatest = _greatest(torch.stack([numbers, -numbers]), group)
    return greatest[0] != -greatest[1]


def _is_copied(value: torch.Tensor, axis: int) -> bool:
    return not isinstance(value, DTensor) or value.placements[axis].is_replicate()


def _sum_of_bits(value: torch.Tensor) -> int:
    """Sum of the local tensor's bytes read as int64, modulo 2**64; no dtype conversion, which would copy it."""
    local = value.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    if not local.numel():
        return 0
    data = local.contiguous().reshape(-1).view(torch.uint8)
    words, rest = data[: len(data) // 8 * 8], data[len(data) // 8 * 8 :]
    if words.storage_offset() % 8:  # a part of another tensor, that begins within a word
        words = words.clone()
    return int(words.view(torch.int64).sum() + rest.sum(dtype=torch.int64))


def _greatest(values: torch.Tensor, group: torch_distributed.ProcessGroup | None) -> torch.Tensor:
    greatest = values.clone()
    torch_distributed.all_reduce(greatest, op=torch_distributed.ReduceOp.MAX, group=group)
    return greatest
