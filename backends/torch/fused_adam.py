"""Keras's Adam and AdamW on PyTorch by torch's fused kernel: one pass over the memory in the place of a dozen.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g g        p = p - alpha m / (sqrt(v) + eps)
    alpha = rate sqrt(1 - b2^t) / (1 - b1^t)

This is Keras's formula (Kingma and Ba 2015, end of section 2), which has the correction for the first steps in alpha.
torch's kernel corrects m and v by t themselves; told a t so late that its corrections are 1, it computes the above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from keras_flow.current.keras_places import torch_optimizers

#: a step after which torch's corrections are 1: 0.999999 to this power is 0
_LATE = 1e9
_DTYPES = (torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")


def update(
    optimizer: Any,
    grads: Sequence[torch.Tensor],
    variables: Sequence[keras.Variable],
    learning_rate: object,
) -> bool:
    """Update this rank's pieces of the variables; False, and nothing is done, where the kernel does not fit.

    Args:
        optimizer: any of Keras's.
        grads: this rank's pieces.
        variables: the variables that they are of.
        learning_rate: a number or a scalar tensor.
    """
    if type(optimizer)._parallel_update_step is not torch_optimizers.Adam._parallel_update_step:
        return False
    lists = [
        [_local(variable) for variable in variables],
        list(grads),
        _slots(optimizer, "_momentums", variables),
        _slots(optimizer, "_velocities", variables),
        *([_slots(optimizer, "_velocity_hats", variables)] if optimizer.amsgrad else []),
    ]
    first = lists[0][0]
    if first.dtype not in _DTYPES or first.device.type not in _DEVICES:
        return False
    # it reads memory as it comes, and compares no shapes
    if not all(_is_as(each, value, first.dtype) for part in lists for each, value in zip(part, lists[0], strict=True)):
        return False
    alpha = _alpha(optimizer, learning_rate, first)
    late = torch.tensor(_LATE, device=first.device)
    params, gradients, momentums, velocities, *highest = lists
    adam(
        params,
        gradients,
        momentums,
        velocities,
        highest[0] if highest else [],
        [late] * len(variables),
        fused=True,
        amsgrad=optimizer.amsgrad,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        lr=alpha,
        weight_decay=0.0,  # Keras has taken it off already
        eps=optimizer.epsilon,
        maximize=False,
    )
    return True


def _alpha(optimizer: Any, learning_rate: object, like: torch.Tensor) -> torch.Tensor:
    """The rate with the correction for the first steps, a number in the dtype of a variable."""

    # operator by operator as Keras has it, in this dtype: near t = 1 the rounding of 1 - b2^t shows in the sixth digit
    def number(value: object) -> torch.Tensor:
        value = _local(value) if isinstance(value, keras.Variable) else value
        if isinstance(value, DTensor):
            value = value._local_tensor
        if isinstance(value, torch.Tensor):
            return value.to(like.dtype)
        return torch.tensor(value, dtype=like.dtype, device=like.device)

    iterations = optimizer.iterations  # where gradients are accumulated a tensor, their quotient
    step = number((_local(iterations) if isinstance(iterations, keras.Variable) else iterations) + 1)
    power_1, power_2 = (torch.pow(number(beta), step) for beta in (optimizer.beta_1, optimizer.beta_2))
    return number(learning_rate) * torch.sqrt(1 - power_2) / (1 - power_1)


def _is_as(each: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> bool:
    is_plain = type(each) in (torch.Tensor, torch.nn.Parameter) and each.is_contiguous()
    return is_plain and each.dtype == dtype and each.shape == value.shape


def _slots(optimizer: keras.optimizers.Optimizer, name: str, variables: Sequence[keras.Variable]) -> list[torch.Tensor]:
    slots = getattr(optimizer, name)
    return [_local(slots[optimizer._get_variable_index(variable)]) for variable in variables]


def _local(variable: keras.Variable) -> torch.Tensor:
    value = variable._value
    return value._local_tensor if isinstance(value, DTensor) else value
