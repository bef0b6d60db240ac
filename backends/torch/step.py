"""The step that is running: set around each step function, read by the hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as torch_distributed

from keras_flow.backends.hooking import hook
from keras_flow.current.distribution import active
from keras_flow.layout import balanced

if TYPE_CHECKING:
    from keras_flow.backends.torch.gathered_weights import Gathered
    from keras_flow.backends.torch.rows.log_readers import LogReaders
    from keras_flow.current.distribution import Distribution


@dataclass(frozen=True)
class OwnRows:
    """The rows of a batch that this rank computes alone, by the balanced split.

    Attributes:
        rows: rows of the logical batch; at least one for each block.
        count: number of blocks of rows.
        index: which block is this rank's.
        groups: the process groups over which a sum of all rows goes, one after the other.
        axes: the axes of the mesh that split the rows; those of the consistent view.
    """

    rows: int
    count: int
    index: int
    groups: tuple[torch_distributed.ProcessGroup, ...]
    axes: tuple[int, ...] = ()

    def own(self, length: int) -> slice:
        """This rank's part of a dim 0 of `length`, which has the same number of entries for each row."""
        if length % self.count == 0 and self.rows % self.count == 0:
            block = length // self.count
            return slice(self.index * block, (self.index + 1) * block)
        start, stop = balanced(self.rows, self.count, self.index)
        each = length // self.rows
        return slice(start * each, stop * each)

    def length(self, index: int, length: int) -> int:
        """The length of block `index` of a dim 0 of which this rank has `length`."""
        if self.rows % self.count == 0:
            return length
        (start, stop), (own_start, own_stop) = (balanced(self.rows, self.count, at) for at in (index, self.index))
        return length * (stop - start) // (own_stop - own_start)

    def logical(self, length: int) -> int:
        """The logical length of a dim 0 of which this rank has `length`: a layer may merge rows and time steps."""
        if self.rows % self.count == 0:
            return length * self.count
        start, stop = balanced(self.rows, self.count, self.index)
        return length * self.rows // (stop - start)


@dataclass
class RunningStep:
    """One step, or one call of a model outside a step.

    Attributes:
        distribution: the distribution that holds.
        consistent: tensors are DTensors with logical shapes; otherwise plain tensors, equal on all ranks (the mirrored
            view).
        inside: a layer is computing this rank's rows right now, on plain tensors.
        layers: the paths of the layers that are being called, the innermost last (consistent view only).
        readers: who reads the logs of this step; None where every step's are read.
        gathered: the weights that are whole for their use; None where they may be kept.
    """

    distribution: Distribution
    consistent: bool
    inside: OwnRows | None = None
    layers: list[str] = field(default_factory=list)
    readers: LogReaders | None = None
    gathered: Gathered | None = None

    @contextlib.contextmanager
    def within(self, path: str) -> Iterator[None]:
        """A layer is being called."""
        self.layers.append(path)
        try:
            yield
        finally:
            self.layers.pop()


_step: ContextVar[RunningStep | None] = ContextVar("keras_flow_torch_step", default=None)


def current_step() -> RunningStep | None:
    """The running step, or None."""
    return _step.get()


def running_step(*args: object, **kwargs: object) -> RunningStep | None:
    """Condition of hooks on what a step computes: the running step."""
    return _step.get()


def step_by_rows(*args: object, **kwargs: object) -> RunningStep | None:
    """Condition of hooks on random draws: the running step, while a layer computes this rank's rows."""
    step = _step.get()
    return step if step is not None and step.inside is not None else None


def step_or_active(*args: object, **kwargs: object) -> RunningStep | Distribution | None:
    """Condition of hooks on what also ranks outside of the placement compute: the running step or distribution."""
    return _step.get() or active()


@hook(
    "torch",
    "cond",
    "torch compiles both branches, and its compiler fails on DTensors: the one that is taken is run",
    when=step_or_active,
)
def cond(
    _: RunningStep | Distribution,
    original: Callable[..., object],
    pred: object,
    true_fn: Callable[..., object],
    false_fn: Callable[..., object],
    operands: Sequence[object] = (),
) -> object:
    """Hook on `torch.cond`: run the branch that is taken."""
    return (true_fn if pred else false_fn)(*operands)


@contextlib.contextmanager
def computing(step: RunningStep, rows: OwnRows | None) -> Iterator[None]:
    """Compute these rows; None: what is inside sees no step of rows."""
    before, step.inside = step.inside, rows
    try:
        yield
    finally:
        step.inside = before


def of_all_rows() -> AbstractContextManager[None]:
    """Inside, draws are not those of this rank's rows."""
    step = current_step()
    return contextlib.nullcontext() if step is None else computing(step, None)


@contextlib.contextmanager
def running(step: RunningStep | None) -> Iterator[RunningStep | None]:
    """Run a step; None: what is inside sees no step."""
    token = _step.set(step)
    try:
        yield step
    finally:
        _step.reset(token)
