"""Finds ranks whose copies of a weight differ, before they train: nothing else would say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_distributed
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import layouts
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

    from keras_flow.placements import Placement


def compare(variables: Sequence[keras.Variable], placement: Placement) -> None:
    """Check that ranks which should hold equal parts of a variable do. A collective of the placement's ranks.

    Each rank sums the bits of its part. Along each axis on which a variable is broadcast, the least and the greatest
    sum must be equal: one all-reduce of two numbers a variable for each axis, whatever the number of ranks.

    Raises:
        FlowError: on all ranks of the placement, naming the variables.
    """
    mesh = layouts.mesh(placement)
    variables = [variable for variable in variables if variable._value is not None]
    differ = torch.zeros(len(variables), dtype=torch.int64)
    for axis in range(mesh.ndim):
        # a sum of bits, not of values: nan equals itself, and -0.0 differs from 0.0
        sums = torch.tensor([_sum_of_bits(v._value) if _is_copied(v._value, axis) else 0 for v in variables])
        differ |= differ_between(sums, mesh.get_group(axis)).to(torch.int64)
    differ = _greatest(differ, layouts.group(placement.ranks))
    paths = [variable.path for variable, is_other in zip(variables, differ.tolist(), strict=True) if is_other]
    if paths:
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        raise FlowError(
            f"the ranks hold different values of {paths[0]!r}{others}, which should be copies of one value. Weights "
            "that were loaded inside the scope must come from the same file on all ranks (on several hosts: a file "
            "that each host has in the same version), and assigned values must be equal on all ranks"
        )


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
