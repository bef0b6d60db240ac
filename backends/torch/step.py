"""The step that is running: set around each step function, read by the hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution


@dataclass
class Step:
    """One step, or one call of a model outside a step.

    Attributes:
        distribution: the distribution that holds.
        consistent: tensors are DTensors with logical shapes; otherwise plain tensors, equal on all ranks, of which
            layers that act row by row compute this rank's rows (the mirrored view).
        inside: in the mirrored view, a layer is computing this rank's rows right now.
    """

    distribution: FlowDistribution
    consistent: bool
    inside: bool = False


_step: ContextVar[Step | None] = ContextVar("keras_flow_torch_step", default=None)


def current_step() -> Step | None:
    """The running step, or None."""
    return _step.get()


def in_step(*args: object, **kwargs: object) -> bool:
    """A hook's condition: a step is running."""
    return _step.get() is not None


def inside_rows(*args: object, **kwargs: object) -> bool:
    """A hook's condition: a layer is computing this rank's rows."""
    step = _step.get()
    return step is not None and step.inside


@contextlib.contextmanager
def running(step: Step) -> Iterator[Step]:
    """Run a step; in the consistent view plain tensors count as replicated meanwhile."""
    token = _step.set(step)
    try:
        if step.consistent:
            with implicit_replication():
                yield step
        else:
            yield step
    finally:
        _step.reset(token)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Let operators mix DTensors and plain tensors. The flag is process-global, so it is always restored."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before
