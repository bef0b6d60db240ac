"""The choice of a signature: the one whose boxing receives the fewest bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from keras_flow.boxing.lower_bound import lower_bound
from keras_flow.layout import Layout, itemsize
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, PartialSum, Sbp, Split, broadcast, text
from keras_flow.signatures.call import OperatorCall, Shape, Signature
from keras_flow.signatures.table import rows_of

#: signatures that an explanation lists beside the chosen one
_SHOWN = 5


@dataclass(frozen=True)
class Option:
    """A signature and what it costs.

    Attributes:
        inputs: nd_sbp of each input.
        outputs: nd_sbp of each output.
        bytes: received by all ranks together to lay the inputs so.
        owed: bytes that all ranks must still receive until partial outputs are summed (p - 1 for each element of a sum
            of p parts, see `kf.boxing.lower_bound`).
        changes: inputs that are laid anew.
        elements: elements of inputs and outputs on the fullest rank.
    """

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    bytes: int
    owed: int
    changes: int
    elements: int

    def __str__(self) -> str:
        inputs = ", ".join(f"({text(one)})" for one in self.inputs)
        outputs = ", ".join(f"({text(one)})" for one in self.outputs)
        return f"{inputs} -> {outputs}"


@dataclass(frozen=True)
class Choice:
    """The chosen signature and the best of those rejected, cheapest first."""

    chosen: Option
    rejected: tuple[Option, ...]


def choose(call: OperatorCall, inputs: Sequence[Layout], dtypes: Sequence[str], out_dtypes: Sequence[str]) -> Choice:
    """The signature for inputs that lie as they do.

    Each axis takes a row of its own; what is left of the shapes after the outer axes decides which rows the next axis
    has. The fewest bytes win, so that a local slice always wins over communication; those owed for partial outputs
    count too, because cutting inputs into summands is free and is paid for later. Then the fewest inputs laid anew,
    then what splits nothing that was whole, then the fewest elements on a rank, then the order of the table.

    Args:
        call: the operator, logical shapes.
        inputs: layout of each input; all on one placement.
        dtypes: dtype of each input.
        out_dtypes: dtype of each output.
    """
    placement = inputs[0].placement
    options = []
    for number, signature in enumerate(signatures(call, placement.hierarchy)):
        moved = changes = 0
        for layout, wanted, dtype in zip(inputs, signature[0], dtypes, strict=True):
            if wanted != layout.nd_sbp:
                moved += _bytes(layout, wanted, dtype)
                changes += 1
        held = sum(
            _elements(placement, nd_sbp, shape)
            for nd_sbp, shape in zip((*signature[0], *signature[1]), (*call.inputs, *call.outputs), strict=True)
        )
        owed = sum(
            (_summands(placement, nd_sbp) - 1) * math.prod(shape) * itemsize(dtype)
            for nd_sbp, shape, dtype in zip(signature[1], call.outputs, out_dtypes, strict=True)
        )
        option = Option(*signature, moved, owed, changes, held)
        options.append((moved + owed, changes, _splits_freely(option), held, number, option))
    options.sort(key=lambda one: one[:-1])
    return Choice(options[0][-1], tuple(one[-1] for one in options[1 : 1 + _SHOWN]))


def signatures(call: OperatorCall, hierarchy: Sequence[int]) -> Iterator[tuple[tuple[NdSbp, ...], tuple[NdSbp, ...]]]:
    """All combinations of rows over the axes: nd_sbp of inputs and of outputs."""
    if not hierarchy:
        yield ((),) * len(call.inputs), ((),) * len(call.outputs)
        return
    ranks, *rest = hierarchy
    for row in rows_of(replace(call, ranks=ranks)):
        inner = replace(
            call,
            is_uneven=call.is_uneven or not _divides(row, call, ranks),
            inputs=tuple(map(functools.partial(_cut, ranks), row.inputs, call.inputs)),
            outputs=tuple(map(functools.partial(_cut, ranks), row.outputs, call.outputs)),
        )
        if not _is_uniform(row, call, ranks):
            continue
        for inputs, outputs in signatures(inner, rest):
            yield (
                tuple((part, *later) for part, later in zip(row.inputs, inputs, strict=True)),
                tuple((part, *later) for part, later in zip(row.outputs, outputs, strict=True)),
            )


def _cut(ranks: int, part: Sbp, shape: Shape) -> Shape:
    if not isinstance(part, Split):
        return shape
    return (*shape[: part.dim], -(-shape[part.dim] // ranks), *shape[part.dim + 1 :])


def _split_lengths(row: Signature, call: OperatorCall) -> set[int]:
    pairs = zip((*row.inputs, *row.outputs), (*call.inputs, *call.outputs), strict=True)
    return {shape[part.dim] for part, shape in pairs if isinstance(part, Split)}


def _divides(row: Signature, call: OperatorCall, ranks: int) -> bool:
    return all(length % ranks == 0 for length in _split_lengths(row, call))


def _is_uniform(row: Signature, call: OperatorCall, ranks: int) -> bool:
    """Whether what is split is split into the same blocks everywhere (lengths are equal, or all divide), and each rank
    has some; an engine's operators are not asked to work on nothing, unless the tensor itself is empty."""
    lengths = _split_lengths(row, call)
    same = len(lengths) <= 1 or (_divides(row, call, ranks) and not call.is_uneven)
    return same and all(length - call.is_uneven >= ranks or length == 0 for length in lengths)


def _summands(placement: Placement, nd_sbp: NdSbp) -> int:
    return math.prod(
        size for size, part in zip(placement.hierarchy, nd_sbp, strict=True) if isinstance(part, PartialSum)
    )


def _splits_freely(option: Option) -> bool:
    """Whether something comes out split although all inputs are whole: nothing asked for it."""
    parts = zip(*option.inputs, strict=True)
    return any(
        all(part == broadcast for part in axis) and any(isinstance(out[number], Split) for out in option.outputs)
        for number, axis in enumerate(parts)
    )


@functools.lru_cache(maxsize=16384)
def _bytes(layout: Layout, wanted: NdSbp, dtype: str) -> int:
    return lower_bound(layout, Layout(layout.placement, wanted, layout.shape), dtype)


@functools.lru_cache(maxsize=16384)
def _elements(placement: Placement, nd_sbp: NdSbp, shape: Shape) -> int:
    return math.prod(Layout(placement, nd_sbp, shape).local_shape(placement.ranks[0]))
