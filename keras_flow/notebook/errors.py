"""How a cell ended on the ranks, as exceptions that a notebook shows in few lines."""

from __future__ import annotations

from collections.abc import Sequence

from keras_flow.errors import LaunchError


class CellError(LaunchError):
    """A cell failed on a rank; the text names the rank that failed first.

    Attributes:
        rank: that rank; None where none did.
        trace: its traceback, as the worker printed it.

    Example:
        >>> print(CellError("rank 2 failed first: ValueError: no", 2))
        rank 2 failed first: ValueError: no
    """

    def __init__(self, message: str, rank: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.trace = rank, trace

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank, self.trace)

    def _render_traceback_(self) -> Sequence[str]:
        """Return the traceback that a notebook shows: that of the rank, not that of the magic."""
        return [*self.trace.splitlines(), "", *str(self).splitlines()]


class CellInterrupted(KeyboardInterrupt):
    """The stop button, or Ctrl-C, has ended a cell on all ranks.

    Example:
        >>> issubclass(CellInterrupted, KeyboardInterrupt)
        True
    """

    def _render_traceback_(self) -> Sequence[str]:
        return [f"KeyboardInterrupt: {self}"]


class ShownError(LaunchError):
    """A cell failed in the kernel, which has shown the error already."""

    def _render_traceback_(self) -> Sequence[str]:
        return []
