"""The layout of a variable: `VariableLayout` is the value and its source, `KerasLayout` how Keras carries it."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_flow import sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution


@dataclass(frozen=True)
class VariableLayout:
    """The layout of a variable and what it was given by.

    Attributes:
        layout: placement, nd_sbp and logical shape.
        source: the rule, `kf.shard`, the variable of a slot, or `"default"`.
        note: why the layout is not the one that was asked for; empty where it is.
        used: the layout in which it is computed with, where it is held split further: the ranks share the memory, not
            the work. None where that is its own.
    """

    layout: Layout
    source: str
    note: str = ""
    used: Layout | None = None

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"{sbp.text(self.layout.nd_sbp)} (from {self.source}{note})"


class KerasLayout(keras.distribution.TensorLayout):
    """A `VariableLayout` as Keras stores it in `variable._layout` and hands it on to optimizer slots.

    Attributes:
        given: the layout and its source.
        distribution: the distribution that gave it.
        of_slots: what `distribution.slot_layout` gave for it; None before it was asked.
    """

    def __init__(self, given: VariableLayout, distribution: Distribution):
        self.given = given
        self.distribution = distribution
        self.of_slots: KerasLayout | None = None
        # as Keras writes them: one name for each dim, a tuple where several axes split it, None for none
        self._axes = tuple(
            None if not axes else axes[0] if len(axes) == 1 else axes
            for axes in (given.layout.axes_of_dim(dim) for dim in range(len(given.layout.shape)))
        )
        self._device_mesh = distribution.device_mesh

    def __deepcopy__(self, memo: object) -> KerasLayout:
        """Return itself: a copy of a variable keeps the layout and the distribution."""
        return self

    __copy__ = functools.partialmethod(__deepcopy__, None)

    def __reduce__(self) -> tuple:
        """A variable that is read from a file, or in another process, has no layout."""
        return type(None), ()

    @property
    def layout(self) -> Layout:
        """Placement, nd_sbp and logical shape."""
        return self.given.layout

    @property
    def of_job(self) -> VariableLayout:
        """The layout as every process sees it: what several processes hold alike has the ranks of all of them."""
        holders, own = self.distribution.holders, self.given.layout
        if not holders or holders == own.placement.ranks:
            return self.given
        lane, ranks = own.placement, np.asarray(holders)
        if lane.size == 1:
            return replace(self.given, layout=Layout(Placement(ranks, type=lane.type), {}, own.shape))
        # ranks that compute a lane together have parts, and each lane has all of them
        lanes = Placement(ranks.reshape(-1, *lane.hierarchy), ("lane", *lane.axis_names), lane.type)
        return replace(self.given, layout=Layout(lanes, (sbp.broadcast, *own.nd_sbp), own.shape))

    @property
    def backend_layout(self) -> object:
        """The engine's description of the layout, for Keras's own code."""
        return self.distribution.engine_layout(self.layout)


def keras_layout(variable: object) -> KerasLayout | None:
    """The keras_flow layout that a variable carries, or None."""
    layout = getattr(variable, "_layout", None)
    return layout if isinstance(layout, KerasLayout) else None


def stage_rank(variable: object) -> int | None:
    """The rank of the pipeline's stage that a variable belongs to; None for all others."""
    layout = keras_layout(variable)
    return None if layout is None else layout.distribution.stage_rank


def is_elsewhere(layout: KerasLayout | None, own: Collection[int]) -> bool:
    """Whether a variable belongs to a pipeline's stage that no rank of this process computes.

    Args:
        layout: the layout of the variable.
        own: the ranks of this process.
    """
    if layout is None or layout.distribution.stage_rank is None:
        return False
    return not set(layout.layout.placement.ranks) & set(own)


def layout_of(variable: keras.Variable) -> VariableLayout:
    """The layout of a variable, and the rule that gave it.

    Raises:
        FlowError: the variable was not made or re-placed under a keras_flow distribution.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.DataParallel().scope():
        ...     variable = keras.Variable(keras.ops.ones((4, 2)), name="table")
        >>> kf.sbp.text(kf.layout_of(variable).layout.nd_sbp)
        'B'
    """
    layout = keras_layout(variable)
    if layout is None:
        if not isinstance(variable, keras.Variable):
            raise FlowError(
                f"kf.layout_of takes a variable, and was given a {type(variable).__qualname__}: a global tensor "
                "(`kf.tensor`) has its layout in `.layout`, and other arrays have none"
            )
        path = getattr(variable, "path", repr(variable))
        raise FlowError(
            f"{path!r} has no keras_flow layout: it was made outside a distribution and not trained under one yet. "
            "Build the model inside `with dist.scope():`, or call `dist.apply(model)`"
        )
    return layout.of_job
