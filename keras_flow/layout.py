"""Layout: which elements of a logical tensor each rank holds.

A layout is a placement, an nd_sbp and a logical shape; `local_slices` says which block of the tensor a rank has. No
array is needed, so that layouts of tensors that fit nowhere can be planned with. `combine` puts a tensor together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.errors import FlowError
from keras_flow.pictures import ranks as pictures
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, PartialSum, Sbp, Split


def balanced(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of block `index` when `length` elements are split over `parts` ranks.

    The balanced split rule (OneFlow's `BalancedSplitter`): the first `length mod parts` blocks hold one element more.

    Example:
        >>> [balanced(10, 4, i) for i in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    base, more = divmod(length, parts)
    start = index * base + min(index, more)
    return start, start + base + (index < more)


@dataclass(frozen=True, init=False)
class Layout:
    """Placement, nd_sbp and logical shape: says which elements each rank holds.

    Axes split one after the other, outer axis first, each the length that the axes before it have left. Shards may be
    empty.

    Args:
        placement: the ranks.
        nd_sbp: one sbp for each placement axis, in any form that `kf.sbp.nd_sbp` reads.
        shape: logical shape, in elements.

    Raises:
        FlowError: an axis or a dimension that does not exist, or a shape that is not one.

    Example:
        >>> mesh = Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        >>> layout = Layout(mesh, {"model": _sbp.split(1)}, (4, 6))
        >>> layout.local_shape(1), layout.local_slices(1), layout.local_bytes(1, "float32")
        ((4, 3), (slice(0, 4, None), slice(3, 6, None)), 48)
    """

    placement: Placement
    nd_sbp: NdSbp
    shape: tuple[int, ...]

    def __init__(self, placement: Placement, nd_sbp: _sbp.SbpSpec, shape: Sequence[int]):
        shape = _checked_shape(shape)
        parts: list[Sbp] = []
        for axis, part in zip(placement.axis_names, _sbp.nd_sbp(nd_sbp, placement.axis_names), strict=True):
            if isinstance(part, Split):
                if not -len(shape) <= part.dim < len(shape):
                    legal = legal_dims(len(shape)) if shape else "a scalar can only be broadcast"
                    raise FlowError(
                        f"split({part.dim}) on axis {axis!r} needs a dimension that the shape {list(shape)} "
                        f"does not have: {legal}"
                    )
                # counted from the front, so that equal layouts compare equal
                part = Split(part.dim % len(shape))
            parts.append(part)
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "nd_sbp", tuple(parts))
        object.__setattr__(self, "shape", shape)

    def local_slices(self, rank: int) -> tuple[slice, ...]:
        """The logical elements that `rank` holds, one slice for each dimension."""
        if rank not in self._slices_of_ranks:
            self._slices_of_ranks[rank] = self._local_slices(rank)
        return self._slices_of_ranks[rank]

    @cached_property
    def _slices_of_ranks(self) -> dict[int, tuple[slice, ...]]:
        # planners ask for the same ranks again and again
        return {}

    def _local_slices(self, rank: int) -> tuple[slice, ...]:
        bounds = [(0, n) for n in self.shape]
        for index, parts, part in zip(
            self.placement.coordinates(rank), self.placement.hierarchy, self.nd_sbp, strict=True
        ):
            if isinstance(part, Split):
                start, stop = bounds[part.dim]
                first, last = balanced(stop - start, parts, index)
                bounds[part.dim] = (start + first, start + last)
        return tuple(slice(start, stop) for start, stop in bounds)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`, in elements."""
        return tuple(part.stop - part.start for part in self.local_slices(rank))

    def local_bytes(self, rank: int, dtype: object) -> int:
        """Bytes of the shard of `rank`."""
        return math.prod(self.local_shape(rank)) * itemsize(dtype)

    @property
    def has_partial(self) -> bool:
        """Whether the tensor is a sum over some axis."""
        return any(isinstance(part, PartialSum) for part in self.nd_sbp)

    @property
    def is_broadcast(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(part == _sbp.broadcast for part in self.nd_sbp)

    def axes_of_dim(self, dim: int) -> tuple[str, ...]:
        """Names of the axes that split dimension `dim` (0 and up), outer first."""
        return tuple(
            axis for axis, part in zip(self.placement.axis_names, self.nd_sbp, strict=True) if part == Split(dim)
        )

    def parts_of_dim(self, dim: int) -> int:
        """Into how many blocks dimension `dim` is split."""
        return math.prod(self.placement.axis_size(axis) for axis in self.axes_of_dim(dim))

    @property
    def divides(self) -> bool:
        """Whether every split dimension divides, so that all shards are of one shape."""
        return all(n % self.parts_of_dim(dim) == 0 for dim, n in enumerate(self.shape))

    def picture(self, title: str = "", width: float = 190) -> str | None:
        """Which rank holds which block, as SVG; None where the ranks are too many to be told apart.

        Of a tensor with more than two dims the ones that are split are drawn, otherwise the two longest.
        """
        if self.placement.size > pictures.MOST_RANKS:
            return None
        split = {part.dim for part in self.nd_sbp if isinstance(part, Split)}
        row_dim, column_dim = pictures.matrix_of(self.shape, sorted(split))
        lengths = [self.shape[dim] if dim >= 0 else 1 for dim in (row_dim, column_dim)]
        sheets: dict[tuple[tuple[int, int], ...], dict[tuple[int, ...], list[int]]] = {}
        for rank in self.placement.ranks:
            slices = self.local_slices(rank)
            spans = tuple(
                (slices[dim].start, slices[dim].stop) if dim >= 0 else (0, 1) for dim in (row_dim, column_dim)
            )
            # ranks that differ along an axis with P hold other summands
            summand = tuple(
                index
                for index, part in zip(self.placement.coordinates(rank), self.nd_sbp, strict=True)
                if isinstance(part, PartialSum)
            )
            sheets.setdefault(spans, {}).setdefault(summand, []).append(rank)
        held = [
            pictures.Block(rows, columns, tuple(tuple(ranks) for ranks in summands.values()))
            for (rows, columns), summands in sheets.items()
        ]
        words = title or f"({_sbp.text(self.nd_sbp)}) of {list(self.shape)}"
        return pictures.blocks((lengths[0], lengths[1]), held, words, width)

    def _repr_html_(self) -> str | None:
        """The picture, for a notebook."""
        return self.picture()

    def __repr__(self) -> str:
        return f"Layout({_sbp.text(self.nd_sbp)} of {list(self.shape)} on {self.placement})"


def legal_dims(count: int) -> str:
    """What an error says of the dims that a shape has.

    Example:
        >>> legal_dims(1), legal_dims(3)
        ('legal is dim 0', 'legal are dims 0 to 2 (from the end -3 to -1)')
    """
    return "legal is dim 0" if count == 1 else f"legal are dims 0 to {count - 1} (from the end {-count} to -1)"


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(operator.index(n) for n in shape)
    except TypeError:
        lengths = (-1,)
    if any(n < 0 for n in lengths):
        raise FlowError(f"a logical shape is a sequence of lengths from 0 up, got {shape!r}; for example (4, 6)")
    return lengths


def itemsize(dtype: object) -> int:
    """Bytes of one element; `"bfloat16"` and the 8-bit floats, which numpy does not know by name, included.

    Raises:
        FlowError: no dtype of that name.
    """
    name = str(dtype)
    if name == "bfloat16":
        return 2
    if name.startswith("float8"):
        return 1
    try:
        return np.dtype(name if isinstance(dtype, str) else dtype).itemsize  # type: ignore[arg-type]
    except TypeError as error:
        raise FlowError(f'{dtype!r} is not a dtype: give its name, for example "float32" or "bfloat16"') from error


def combine(layout: Layout, shards: Mapping[int, np.ndarray]) -> np.ndarray:
    """The logical tensor from the shards of all ranks: the inverse of cutting, with summation over `P` axes.

    Args:
        layout: the layout of the shards.
        shards: rank -> array of `layout.local_shape(rank)`.

    Raises:
        FlowError: a rank is missing or a shard has another shape.
    """
    placement = layout.placement
    dtype = next(iter(shards.values())).dtype if shards else np.dtype("float32")
    out = np.zeros(layout.shape, dtype)
    for rank in placement.ranks:
        if rank not in shards or tuple(shards[rank].shape) != layout.local_shape(rank):
            given = "none" if rank not in shards else f"shape {list(shards[rank].shape)}"
            raise FlowError(f"shard of rank {rank}: expected shape {list(layout.local_shape(rank))}, found {given}")
        copies = [
            index
            for index, part in zip(placement.coordinates(rank), layout.nd_sbp, strict=True)
            if not isinstance(part, Split | PartialSum)
        ]
        if any(copies):  # another rank of a broadcast axis has the same elements: take them once
            continue
        region = layout.local_slices(rank)
        out[region] = out[region] + shards[rank] if layout.has_partial else shards[rank]
    return out
