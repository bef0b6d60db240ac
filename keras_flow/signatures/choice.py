"""Chooses the signature of an operator's call: the one for which the fewest bytes are received.

`signatures` combines the table's signatures of each placement axis; `choose` compares what their boxing costs by a
lower bound (`kf.boxing.lower_bound`), so that no plan is made for the ones that are rejected.
"""

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
from keras_flow.signatures.table import signatures_on_axis

#: signatures that an explanation lists beside the chosen one
_SHOWN = 5


@dataclass(frozen=True)
class Option:
    """A signature on all axes and what it costs.

    Attributes:
        inputs: nd_sbp of each input.
        outputs: nd_sbp of each output.
        bytes: received by all ranks together to bring the inputs into these layouts.
        owed: bytes that all ranks must still receive until partial outputs are summed (p - 1 for each element of a sum
            of p parts, see `kf.boxing.lower_bound`).
        changes: inputs whose layout changes.
        elements: elements of inputs and outputs on the fullest rank.
    """

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    bytes: int
    owed: int
    changes: int
    elements: int

    def __str__(self) -> str:
        inputs = ", ".join(f"({text(nd_sbp)})" for nd_sbp in self.inputs)
        outputs = ", ".join(f"({text(nd_sbp)})" for nd_sbp in self.outputs)
        return f"{inputs} -> {outputs}"


@dataclass(frozen=True)
class Choice:
    """The chosen signature and the best of those rejected, cheapest first."""

    chosen: Option
    rejected: tuple[Option, ...]


def choose(call: OperatorCall, inputs: Sequence[Layout], dtypes: Sequence[str], out_dtypes: Sequence[str]) -> Choice:
    """The cheapest signature for inputs with these layouts.

    Each axis has a signature of its own; what the outer axes leave of the shapes decides which ones the next axis has.
    The order of preference:

    1. the fewest bytes, so that a local slice always wins over communication. Bytes owed for partial outputs count,
       because cutting inputs into summands is free and is paid for later;
    2. the fewest inputs whose layout changes;
    3. outputs that are split only where an input is;
    4. the fewest elements on a rank;
    5. the order of the table.

    Args:
        call: the operator, logical shapes.
        inputs: layout of each input; all on one placement.
        dtypes: dtype of each input.
        out_dtypes: dtype of each output.
    """
    placement = inputs[0].placement
    options: list[tuple[int, int, bool, int, int, Option]] = []
    for number, signature in enumerate(signatures(call, placement.hierarchy)):
        received = changes = 0
        for layout, wanted, dtype in zip(inputs, signature[0], dtypes, strict=True):
            # an input that has the layout already costs nothing; most inputs of a training step do
            if wanted != layout.nd_sbp:
                received += _bytes(layout, wanted, dtype)
                changes += 1
        elements = sum(
            _elements(placement, nd_sbp, shape)
            for nd_sbp, shape in zip((*signature[0], *signature[1]), (*call.inputs, *call.outputs), strict=True)
        )
        owed = sum(
            (_summands(placement, nd_sbp) - 1) * math.prod(shape) * itemsize(dtype)
            for nd_sbp, shape, dtype in zip(signature[1], call.outputs, out_dtypes, strict=True)
        )
        option = Option(*signature, received, owed, changes, elements)
        options.append((received + owed, changes, _splits_freely(option), elements, number, option))
    # options themselves have no order: the number of each in the table decides last
    options.sort(key=lambda ranked: ranked[:-1])
    return Choice(options[0][-1], tuple(ranked[-1] for ranked in options[1 : 1 + _SHOWN]))


def signatures(call: OperatorCall, hierarchy: Sequence[int]) -> Iterator[tuple[tuple[NdSbp, ...], tuple[NdSbp, ...]]]:
    """The signatures of a call on a whole hierarchy of axes, outer axis first: nd_sbp of inputs and of outputs."""
    if not hierarchy:
        yield ((),) * len(call.inputs), ((),) * len(call.outputs)
        return
    # axis by axis, outer first: 8 rows split over 2 leave 4 for the next axis to split
    ranks, *rest = hierarchy
    for signature in signatures_on_axis(replace(call, ranks=ranks)):
        # the next axis splits what this one leaves
        inner = replace(
            call,
            is_uneven=call.is_uneven or not _divides(signature, call, ranks),
            inputs=tuple(map(functools.partial(_cut, ranks), signature.inputs, call.inputs)),
            outputs=tuple(map(functools.partial(_cut, ranks), signature.outputs, call.outputs)),
        )
        # each rank runs the operator on its shards, whose lengths must fit together
        if not _is_uniform(signature, call, ranks):
            continue
        for inputs, outputs in signatures(inner, rest):
            yield (
                tuple((part, *later) for part, later in zip(signature.inputs, inputs, strict=True)),
                tuple((part, *later) for part, later in zip(signature.outputs, outputs, strict=True)),
            )


def _cut(ranks: int, part: Sbp, shape: Shape) -> Shape:
    """The shape of the largest shard."""
    if not isinstance(part, Split):
        return shape
    return (*shape[: part.dim], -(-shape[part.dim] // ranks), *shape[part.dim + 1 :])


def _split_lengths(signature: Signature, call: OperatorCall) -> set[int]:
    """The lengths of all dims that a signature splits."""
    pairs = zip((*signature.inputs, *signature.outputs), (*call.inputs, *call.outputs), strict=True)
    return {shape[part.dim] for part, shape in pairs if isinstance(part, Split)}


def _divides(signature: Signature, call: OperatorCall, ranks: int) -> bool:
    return all(length % ranks == 0 for length in _split_lengths(signature, call))


def _is_uniform(signature: Signature, call: OperatorCall, ranks: int) -> bool:
    """Whether split tensors are split into the same blocks (lengths are equal, or all divide), and no block is empty.

    An engine's operators are asked to work on empty shards only where the tensor itself is empty.
    """
    # 7 and 7 over 2 ranks are 4 and 3 on both; 7 and 5 would not fit together row by row
    lengths = _split_lengths(signature, call)
    same = len(lengths) <= 1 or (_divides(signature, call, ranks) and not call.is_uneven)
    return same and all(length - call.is_uneven >= ranks or length == 0 for length in lengths)


def _summands(placement: Placement, nd_sbp: NdSbp) -> int:
    """How many partial tensors a layout's tensor is the sum of."""
    return math.prod(
        size for size, part in zip(placement.hierarchy, nd_sbp, strict=True) if isinstance(part, PartialSum)
    )


def _splits_freely(option: Option) -> bool:
    """Whether an output is split on an axis on which all inputs are whole: nothing asked for it."""
    # one tuple for each axis, with the sbp of every input there
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
