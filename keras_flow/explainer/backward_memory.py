"""Memory of a backward pass, call by call; of layers that are computed again (`remat=`) as one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_flow.explainer.graph import LayerCall
from keras_flow.explainer.step_cost import StepCost


@dataclass(frozen=True)
class CallMemory:
    """What one call of a layer needs, in bytes on one rank.

    Attributes:
        kept_for_backward: its outputs, and what else stays until its backward pass.
        tensor_gradients: gradients of its inputs and outputs, which exist together during its backward pass.
        backward_workspace: what its backward pass needs besides.
        variable_gradients: gradients of its variables, which stay until the update.
    """

    kept_for_backward: int
    tensor_gradients: int = 0
    backward_workspace: int = 0
    variable_gradients: int = 0


def backward_peak(calls: Sequence[CallMemory]) -> int:
    """Most bytes of activations, their gradients and the variables' gradients in a backward pass over these calls.

    Each call, last first, needs what the calls up to it keep, the gradients of its inputs and outputs, and workspace.
    """
    kept, gradients, peak = sum(call.kept_for_backward for call in calls), 0, 0
    for call in reversed(calls):
        peak = max(peak, kept + call.tensor_gradients + call.backward_workspace + gradients)
        gradients += call.variable_gradients
        kept -= call.kept_for_backward
    return peak


def with_blocks(
    step: StepCost, calls: Sequence[LayerCall], memory: Sequence[CallMemory], blocks: Sequence[Any]
) -> list[CallMemory]:
    """The memory of calls, those of each block that is computed again made one: it keeps its outputs alone.

    Example: of a block of two calls that keep 8 and 2 bytes, 2 are kept. Its backward pass needs the 8 again.
    """
    of_layer = {id(inner): number for number, block in enumerate(blocks) for inner in block._flatten_layers()}
    found: list[CallMemory] = []
    begin = 0
    while begin < len(calls):
        block, end = of_layer.get(id(calls[begin].layer)), begin + 1
        while block is not None and end < len(calls) and of_layer.get(id(calls[end].layer)) == block:
            end += 1
        inside = list(memory[begin:end])
        if block is not None:
            kept = sum(step.local(key) for key in calls[end - 1].outputs)
            kept_inside = sum(each.kept_for_backward for each in inside)
            gradients = sum(each.variable_gradients for each in inside)
            step.activations -= kept_inside - kept
            inside = [CallMemory(kept, 0, backward_peak(inside) - kept, gradients)]
        found += inside
        begin = end
    return [*found, *memory[len(calls) :]]
