"""ZeRO: what an optimizer keeps of a variable is split over the ranks that hold the variable alike.

Ranks that differ along an axis of the batch hold equal weights, and would hold equal slots. Each keeps a part of the
slots instead, updates its part of the weights, and receives the other parts (Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models"). In keras_flow's words a slot has a layout of its own; the
gradient is boxed from P to it, and the new weight from it to the variable's layout. In the third stage the weight has
that layout too, and is gathered where it is used.

Example: a kernel [6, 8], broadcast over 2 ranks. Its momentum has S(0): rank 0 keeps rows 0 to 2 and computes the new
rows 0 to 2 of the kernel. Both ranks then gather the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_flow import sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.sbp import Split

#: stage -> what is split over the ranks
STAGES = {1: "slots", 2: "slots and gradients", 3: "weights as well"}


@dataclass(frozen=True)
class Zero:
    """The tensors that a distribution splits over ranks which hold a variable alike (ZeRO).

    Attributes:
        stage: 0: nothing; 1: the optimizer's slots; 2: gradients too, as soon as they are known; 3: weights too.
        axes: the axes over which they are split, in the order of the placement's.
        min_size: elements that a rank's part has at least; slots of smaller variables stay whole.
    """

    stage: int
    axes: tuple[str, ...]
    min_size: int


def zero_of(stage: int, axes: str | Sequence[str] | None, min_size: int, batch_axes: Sequence[str]) -> Zero:
    """Check the arguments `zero`, `zero_axes` and `zero_min_size` of a distribution, and return what they ask for.

    Raises:
        FlowError: there is no such stage, an axis does not split the batch, or `min_size` is no positive number.

    Example:
        >>> zero_of(1, None, 1024, batch_axes=("data",))
        Zero(stage=1, axes=('data',), min_size=1024)
    """
    if isinstance(stage, bool) or stage not in (0, *STAGES):
        known = ", ".join(f"{number} ({what})" for number, what in STAGES.items())
        raise FlowError(f"zero={stage!r}: legal are 0 (nothing is split), {known}")
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FlowError(f"zero_min_size={min_size!r}: legal is a whole number of at least 1 (elements)")
    asked = tuple(batch_axes) if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    wrong = [axis for axis in asked if axis not in batch_axes]
    if wrong:
        raise FlowError(
            f"zero_axes names {wrong}; slots are split over axes that split the batch, which are {list(batch_axes)}"
        )
    if stage and not asked:
        raise FlowError(f"zero={stage} splits over the axes of the batch, and no axis of the placement splits it")
    return Zero(stage, tuple(axis for axis in batch_axes if axis in asked), min_size)


def layouts_of_slots(layout: Layout, axes: Sequence[str], min_size: int) -> list[Layout]:
    """The layouts that slots of a variable may have, best first; none where each rank's part would be too small.

    All axes on which the variable is broadcast split one dim: the first that divides, and that no axis further inside
    splits already. So a rank's part is always within what the rank has of the variable, and new weights need an
    all-gather alone. Where no dim divides by all axes, the inner ones are tried without the outermost.

    On a placement of one axis it is OneFlow's rule (its `optimizer_placement_optimization_pass.cpp`): B becomes S(0).
    Where that does not divide, OneFlow leaves the slots whole, and here the next dim is tried. On more axes OneFlow
    splits over one of them, which leaves slots alike on the others; and it copies the split of the axis beside it,
    which makes (S(0), S(0)) of (B, S(0)): parts that lie outside of what a rank has of the variable.

    Args:
        layout: the variable's layout.
        axes: the axes to split over.
        min_size: elements that a part has at least.

    Example:
        >>> from keras_flow import Placement
        >>> mesh = Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        >>> [each.nd_sbp for each in layouts_of_slots(Layout(mesh, {"model": sbp.split(0)}, (6, 8)), ("data",), 1)]
        [(S(1), S(0))]
    """
    placement = layout.placement
    free = [
        axis
        for axis, part in zip(placement.axis_names, layout.nd_sbp, strict=True)
        if axis in axes and part == sbp.broadcast and placement.axis_size(axis) > 1
    ]
    found = []
    for first in range(len(free)):
        chosen = free[first:]
        ranks = math.prod(placement.axis_size(axis) for axis in chosen)
        for dim, length in enumerate(layout.shape):
            outside = [axis for axis in layout.axes_of_dim(dim) if placement.axis_size(axis) > 1]
            is_nested = all(_at(layout, axis) < _at(layout, chosen[0]) for axis in outside)
            divides = length % (ranks * layout.parts_of_dim(dim)) == 0
            size = math.prod(layout.local_shape(placement.ranks[0])) // ranks
            if is_nested and divides and size >= min_size:
                parts = dict(zip(placement.axis_names, layout.nd_sbp, strict=True))
                found.append(Layout(placement, {**parts, **dict.fromkeys(chosen, Split(dim))}, layout.shape))
    return found


def why_whole(layout: Layout, axes: Sequence[str], min_size: int, of_weights: bool) -> str:
    """The reason why no layout was found; empty where such a variable is small, or split already."""
    found = [axis for axis in axes if layout.nd_sbp[_at(layout, axis)] == sbp.broadcast]
    ranks = math.prod(layout.placement.axis_size(axis) for axis in found)
    if ranks == 1 or math.prod(layout.local_shape(layout.placement.ranks[0])) // ranks < min_size:
        return ""
    whole = [dim for dim in range(len(layout.shape)) if layout.parts_of_dim(dim) == 1]
    if not whole:  # the bias of a layer that is split by columns, say: its slots are split as it is
        return ""
    what = "variables of shape" if of_weights else "slots of variables of shape"
    return f"{what} {list(layout.shape)} stay whole: none of their dims divides by the {ranks} ranks of {found}"


def _at(layout: Layout, axis: str) -> int:
    return layout.placement.axis_names.index(axis)
