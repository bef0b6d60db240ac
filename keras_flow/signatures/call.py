"""`OperatorCall`: an operator and the shapes of its arguments, which decide its signatures, each a `Signature`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_flow.errors import FlowError
from keras_flow.sbp import Sbp, text

Shape = tuple[int, ...]


def dims_of(axis: int | Sequence[int] | None, ndim: int) -> frozenset[int]:
    """The dims, counted from 0, that an `axis` argument names; None means all.

    >>> sorted(dims_of((-1, 0), ndim=3))
    [0, 2]

    Raises:
        FlowError: there is no such dim.
    """
    if axis is None:
        return frozenset(range(ndim))
    dims = axis if isinstance(axis, Sequence) else (axis,)
    for dim in dims:
        if not -ndim <= dim < ndim:
            raise FlowError(f"axis {dim} of a tensor of {ndim} dims: {-ndim} to {ndim - 1} are legal")
    return frozenset(dim % ndim for dim in dims)


@dataclass(frozen=True)
class OperatorCall:
    """An operator and its arguments.

    Attributes:
        name: name in `keras.ops`.
        inputs: shapes of the tensors among its arguments, in order.
        outputs: shapes of its results.
        options: its other arguments, by name.
        names: parameter of each input; those of a list of tensors have the same one.
        ranks: ranks of the placement axis whose signatures are asked for.
        is_uneven: an outer axis splits unevenly, so that lengths differ between ranks.
        dtypes: of each input, then of each result; empty where they are not known.
    """

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names: tuple[str, ...] = ()
    ranks: int = 1
    is_uneven: bool = False
    dtypes: tuple[str, ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor, or `default` where it was not given."""
        return self.options.get(name, default)

    def at(self, name: str) -> int | None:
        """The index in `inputs` of the argument `name`; None where it is no tensor."""
        # of a list of tensors the first
        return self.names.index(name) if name in self.names else None


@dataclass(frozen=True)
class Signature:
    """Layouts of an operator's inputs and outputs on one placement axis that fit together.

    >>> from keras_flow.sbp import Split, broadcast, partial_sum
    >>> print(Signature((Split(1), Split(0)), (partial_sum,)))
    (S(1),S(0)) -> (P)

    Attributes:
        inputs: sbp of each input.
        outputs: sbp of each output.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    def __str__(self) -> str:
        return f"({text(self.inputs)}) -> ({text(self.outputs)})"
