"""What a rank holds at most in a training step: an estimate, from what each call keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """What one call of a layer needs, in bytes on one rank.

    Attributes:
        kept: its outputs, and what else stays until its backward pass.
        ends: gradients of its outputs and inputs, which its backward pass has at one time.
        room: what its backward pass needs besides.
        gradients: of its variables, which stay until the update.
    """

    kept: int
    ends: int = 0
    room: int = 0
    gradients: int = 0


def backward_peak(calls: Sequence[Held]) -> int:
    """Most bytes of activations, their gradients and the variables' gradients in a backward pass over these calls.

    Each call, last first, needs what the calls up to it kept, the gradients at its two ends, and its own room.
    """
    kept, gradients, most = sum(call.kept for call in calls), 0, 0
    for call in reversed(calls):
        most = max(most, kept + call.ends + call.room + gradients)
        gradients += call.gradients
        kept -= call.kept
    return most
