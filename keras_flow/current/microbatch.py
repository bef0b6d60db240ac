"""The micro-batch that is being computed: rows of the batch that a stage of a pipeline computes at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from keras_flow.scoped import setting

_current: ContextVar[Microbatch | None] = ContextVar("keras_flow_microbatch", default=None)


@dataclass(frozen=True)
class Microbatch:
    """Rows of a batch.

    Attributes:
        start: the first of them: a number, or a scalar of the program that is being traced.
        count: how many.
        rows: the number of rows of the batch.
    """

    start: Any
    count: int
    rows: int

    def of(self, length: int) -> tuple[int, slice]:
        """Return the batch's length of a dim 0 of `length` here, and the slice of it that is here.

        The dim may be longer than the rows: a layer may merge others into it.
        """
        each = length // self.count
        return self.rows * each, slice(self.start * each, self.start * each + length)


def current() -> Microbatch | None:
    """The micro-batch that is being computed, or None."""
    return _current.get()


def computing(part: Microbatch | None) -> AbstractContextManager[None]:
    """Inside, the rows of a micro-batch are computed."""
    return setting(_current, part)
