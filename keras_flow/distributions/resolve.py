"""The layout that a variable gets, from the one that a rule asks for: every fallback, the same on all engines.

A split that does not divide becomes broadcast on that axis, and so does one that the engine cannot hold according to
its capability record. Each fallback has a reason, one sentence for the warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keras

from keras_flow import sbp
from keras_flow.current import keras_places
from keras_flow.layout import Layout
from keras_flow.sbp import PartialSum, Split

if TYPE_CHECKING:
    from keras_flow.backends.engine_records import Capabilities
    from keras_flow.placements import Placement


@dataclass(frozen=True)
class Fitted:
    """A layout that the engine can hold, and why it differs from the requested one.

    Attributes:
        layout: the layout.
        reasons: one sentence for each split that became broadcast.
    """

    layout: Layout
    reasons: tuple[str, ...] = ()


def fit_layout(
    requested: Layout,
    path: str,
    capabilities: Capabilities,
    joined_axes: Sequence[tuple[str, ...]] = (),
    layer: keras.Layer | None = None,
    dtype: str = "float32",
) -> Fitted:
    """The layout nearest to `requested` that divides and that the engine can hold.

    Args:
        requested: the layout of the rule.
        path: variable path, for the reasons.
        capabilities: the engine's record.
        joined_axes: groups of axes that this distribution only ever uses together, so that an engine without several
            axes on one dim can hold them as one flattened axis.
        layer: the layer that owns the variable, where known.
        dtype: the variable's.
    """
    parts = list(requested.nd_sbp)
    names = requested.placement.axis_names
    reasons: list[str] = []

    def give_up(axis: str, reason: str) -> None:
        parts[names.index(axis)] = sbp.broadcast
        if reason not in reasons:
            reasons.append(reason)

    unsplit = held_whole(capabilities, layer, dtype) or _must_be_whole(capabilities, layer, path)
    for dim, length in enumerate(requested.shape):
        axes = requested.axes_of_dim(dim)
        if not axes:
            continue
        if unsplit:
            for axis in axes:
                give_up(axis, f"{path}: {unsplit}; broadcast on axis {axis!r}")
            continue
        if len(axes) > 1 and not capabilities.several_axes_on_one_dim and axes not in joined_axes:
            reason = (
                f"{path}: this engine holds one axis on a dimension, dim {dim} asks for {list(axes)} and "
                f"other tensors use these axes separately; split on {axes[0]!r} only"
            )
            # the outermost axis stays: its blocks are the same with and without the others
            for axis in axes[1:]:
                give_up(axis, reason)
            axes = axes[:1]
        kept = 1
        for axis in axes:
            size = requested.placement.axis_size(axis)
            # axes split one after the other, so this one must divide what the axes before it leave
            if length % (kept * size):
                give_up(axis, f"{path}: {_uneven(dim, length, kept, axis, size)}")
            else:
                kept *= size
    return Fitted(Layout(requested.placement, parts, requested.shape), tuple(reasons))


def held_whole(capabilities: Capabilities, layer: keras.Layer | None, dtype: str) -> str:
    """The engine's reason why it holds such a variable whole whatever is asked, or an empty text."""
    found = {
        "integers": not keras.backend.is_float_dtype(dtype),
        "preprocessing": layer is not None and keras_places.is_of_keras(type(layer), "layers.preprocessing"),
    }
    return next((reason for kind, reason in capabilities.held_whole.items() if found[kind]), "")


def _must_be_whole(capabilities: Capabilities, layer: keras.Layer | None, path: str) -> str:
    """The engine's reason why this variable cannot be split, or an empty text."""
    if layer is None:
        return ""
    for cls in type(layer).__mro__:
        names, reason = capabilities.whole_variables.get(cls.__name__, ((), ""))
        if path.rpartition("/")[2] in names:
            return reason
    return ""


def _uneven(dim: int, whole: int, kept: int, axis: str, size: int) -> str:
    """The reason of a split that does not divide; `kept` parts are those of the axes before."""
    length = whole // kept
    of = f"{length}" if kept == 1 else f"{length} (of its {whole}, cut in {kept} by the axes before)"
    # named in the warning, so that a user knows which length or placement would do
    best = max(n for n in range(1, size + 1) if length % n == 0)
    axes = f", or an axis of {best} ranks" if best > 1 else ""
    return (
        f"dim {dim} of {of} does not divide by axis {axis!r} of {size} ranks "
        f"({-(-length // size) * size} would{axes}); broadcast on that axis"
    )


def problems_of(requested: Layout, source: str, path: str) -> list[str]:
    """Return the errors of a requested layout on any engine: a variable cannot be a partial sum."""
    if any(isinstance(part, PartialSum) for part in requested.nd_sbp):
        return [f"{path}: {source} asks for partial_sum; a variable is split or broadcast"]
    return []


def joined_axes(
    uses: Sequence[sbp.NdSbp], batch_axes: Sequence[str], names: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Groups of axes that split one dimension together wherever one of them is used.

    TensorFlow's DTensor can hold such a group as one flattened axis.

    Example:
        >>> joined_axes([sbp.parse("S(0),S(0),B")], batch_axes=(), names=("a", "b", "c"))
        (('a', 'b'),)

    Args:
        uses: nd_sbps of all rules.
        batch_axes: the axes that split the batch.
        names: axis names of the placement, outer first.
    """
    # axes that one tensor uses together and another one apart cannot be flattened into one
    groups: set[tuple[str, ...]] = set()
    if batch_axes:
        groups.add(tuple(name for name in names if name in batch_axes))
    for nd_sbp in uses:
        for dim in {part.dim for part in nd_sbp if isinstance(part, Split)}:
            groups.add(tuple(name for name, part in zip(names, nd_sbp, strict=True) if part == Split(dim)))
    return tuple(
        sorted(
            group
            for group in groups
            if len(group) > 1 and all(group == second or not set(group) & set(second) for second in groups)
        )
    )


def rows_on_one_axis(
    placement: Placement, batch_axes: Sequence[str], joined: Sequence[tuple[str, ...]], capabilities: Capabilities
) -> str:
    """Return why an engine splits rows over one of several batch axes, or an empty text."""
    sizes = {axis: placement.axis_size(axis) for axis in batch_axes if placement.axis_size(axis) > 1}
    if len(sizes) < 2 or capabilities.several_axes_on_one_dim or tuple(batch_axes) in joined:
        return ""
    times = math.prod(sizes.values()) // max(sizes.values())
    return (
        f"batch_axes: this engine holds one axis on a dimension, and zero_axes= or a rule uses some of "
        f"{list(batch_axes)} alone; rows are split over the largest of them only, and each row is computed {times} "
        "times. Use all of them together, or another engine"
    )
