"""The tape: what `kf.value_and_grad` records while a program runs, so that `gradients.py` can walk it back.

A record holds the tensors themselves and the tape knows tensors by `id`: as long as the tape lives no id is given to
another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from keras_flow.sbp import SbpSpec
from keras_flow.scoped import setting
from keras_flow.tensors.dtypes import is_float

if TYPE_CHECKING:
    from keras_flow.tensors.global_tensor import GlobalTensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class OperatorRecord:
    """One operator that ran on tensors which depend on the arguments.

    Attributes:
        inputs: as the program gave them; gradients are added up for these.
        boxed: the same tensors in the layouts of the chosen signature, from which each rank computed.
        results: what the program received.
        pullbacks: rank -> function from the cotangents of its float results to those of its float inputs; the ranks of
            this process only.
    """

    inputs: tuple[GlobalTensor, ...]
    boxed: tuple[GlobalTensor, ...]
    results: tuple[GlobalTensor, ...]
    pullbacks: Mapping[int, Callable[..., list]]


@dataclass(frozen=True)
class BoxingRecord:
    """One `x.to_global(...)`.

    Attributes:
        before: the tensor.
        after: the same logical tensor in its new layout.
        grad_sbp: layout that the program asked for the gradient of `after`; None: it keeps the one it has.
    """

    before: GlobalTensor
    after: GlobalTensor
    grad_sbp: SbpSpec | None = None


@dataclass
class Tape:
    """A record of the operators on tensors that depend on the arguments, in order.

    Attributes:
        watched: ids of these tensors.
        records: one for each operator, first to last.
    """

    watched: set[int]
    records: list[OperatorRecord | BoxingRecord] = field(default_factory=list)


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


def record(program: Callable[[], Result], leaves: Sequence[GlobalTensor]) -> tuple[Result, Tape]:
    """Run a program; returns its result and the tape of what it did to tensors that depend on `leaves`."""
    # at first the arguments; each operator adds its results
    tape = Tape({id(leaf) for leaf in leaves})
    with _using(tape):
        return program(), tape


def is_recording() -> bool:
    """Whether some program is being recorded."""
    return _tape.get() is not None


def paused() -> AbstractContextManager[None]:
    """Inside, nothing is recorded."""
    # walking back also runs operators, which are no part of the program
    return _using(None)


def _using(tape: Tape | None) -> AbstractContextManager[None]:
    return setting(_tape, tape)


def watches(tensors: Sequence[GlobalTensor]) -> bool:
    """Whether the result of an operator on these tensors has to be differentiated."""
    tape = _tape.get()
    return tape is not None and any(id(tensor) in tape.watched and is_float(tensor.dtype) for tensor in tensors)


def record_operator(
    inputs: Sequence[GlobalTensor],
    boxed: Sequence[GlobalTensor],
    results: Sequence[GlobalTensor],
    pullbacks: Mapping[int, Callable[..., list]],
) -> None:
    """Note an operator for which `watches(inputs)` holds."""
    tape = _tape.get()
    assert tape is not None
    tape.records.append(OperatorRecord(tuple(inputs), tuple(boxed), tuple(results), dict(pullbacks)))
    # what depends on them depends on the arguments
    tape.watched |= {id(tensor) for tensor in results}


def record_boxing(before: GlobalTensor, after: GlobalTensor, grad_sbp: SbpSpec | None) -> None:
    """Note a change of layout, if the tensor depends on the arguments."""
    tape = _tape.get()
    if tape is not None and id(before) in tape.watched:
        tape.records.append(BoxingRecord(before, after, grad_sbp))
        tape.watched.add(id(after))
