"""A call of an operator as the table sees it, and a row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_flow.sbp import Sbp, text

Shape = tuple[int, ...]


def dims_of(axis: int | Sequence[int] | None, ndim: int) -> frozenset[int]:
    """The dims, from 0 up, that an `axis` argument names; None means all."""
    if axis is None:
        return frozenset(range(ndim))
    return frozenset(one % ndim for one in (axis if isinstance(axis, Sequence) else (axis,)))


@dataclass(frozen=True)
class OperatorCall:
    """An operator and its arguments.

    Attributes:
        name: name in `keras.ops`.
        inputs: shapes of the tensors among its arguments, in order.
        outputs: shapes of its results.
        options: its other arguments, by name.
        names: parameter of each input; those of a list of tensors have the same one.
        ranks: ranks of the axis that rows are asked for.
        is_uneven: an outer axis splits unevenly, so that lengths differ between ranks.
    """

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    ranks: int = 1
    is_uneven: bool = False

    def option(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor."""
        return self.options.get(name, default)

    def at(self, name: str) -> int | None:
        """The place of the input that is argument `name`; None where none is."""
        return self.names.index(name) if name in self.names else None


@dataclass(frozen=True)
class Signature:
    """One legal combination on one placement axis.

    Attributes:
        inputs: sbp of each input.
        outputs: sbp of each output.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    def __str__(self) -> str:
        return f"({text(self.inputs)}) -> ({text(self.outputs)})"
