"""What a variable got: its layout, the rule that gave it, and how Keras carries both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras.src.distribution.distribution_lib import TensorLayout  # Keras tests variables' layouts against this class

from keras_flow import sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout

if TYPE_CHECKING:
    import keras

    from keras_flow.distributions.distribution import FlowDistribution


@dataclass(frozen=True)
class Placed:
    """The layout of a variable and where it comes from.

    Attributes:
        layout: placement, nd_sbp and logical shape.
        source: the rule, `kf.shard`, the variable of a slot, or `"default"`.
        note: why the layout is not the one that was asked for; empty where it is.
        gathered: whether the engine gathers a split variable where it is used: the ranks share the memory, not the
            work.
    """

    layout: Layout
    source: str
    note: str = ""
    gathered: bool = False

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"{sbp.text(self.layout.nd_sbp)} (from {self.source}{note})"


class PlacedLayout(TensorLayout):
    """A `Placed` in the form that Keras stores as `variable._layout` and hands on to optimizer slots."""

    def __init__(self, placed: Placed, distribution: FlowDistribution):
        self.placed = placed
        self.distribution = distribution
        self._axes = tuple(
            None if not axes else axes[0] if len(axes) == 1 else axes
            for axes in (placed.layout.axes_of_dim(dim) for dim in range(len(placed.layout.shape)))
        )
        self._device_mesh = distribution.device_mesh

    @property
    def backend_layout(self) -> object:
        """The engine's description of the layout."""
        from keras_flow.backends.active import backend

        return backend().engine_layout(self.placed.layout)


def placed_layout(variable: object) -> PlacedLayout | None:
    """The keras_flow layout that a variable carries, or None."""
    layout = getattr(variable, "_layout", None)
    return layout if isinstance(layout, PlacedLayout) else None


def layout_of(variable: keras.Variable) -> Placed:
    """Layout of a variable and the rule that gave it.

    Raises:
        FlowError: the variable was not made or re-placed under a keras_flow distribution.
    """
    layout = placed_layout(variable)
    if layout is None:
        path = getattr(variable, "path", repr(variable))
        raise FlowError(
            f"{path!r} has no keras_flow layout: it was made outside a distribution and not trained under one yet. "
            "Build the model inside `with dist.scope():`, or call `dist.apply(model)`"
        )
    return layout.placed
