"""The active distribution as backends see it: the base class of ours, and `active`, which returns the one in use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import keras

from keras_flow import sbp
from keras_flow.current.batch import BatchPlan, UnevenNotice
from keras_flow.current.keras_places import KerasDistribution, current_distribution
from keras_flow.errors import FlowError
from keras_flow.layout import legal_dims
from keras_flow.scoped import setting

if TYPE_CHECKING:
    from keras_flow.current.variable_layout import KerasLayout
    from keras_flow.layout import Layout
    from keras_flow.placements import Placement


class ActivationLayout:
    """A layout for a layer's output, whose shape is known only when the layer is called."""

    def __init__(self, nd_sbp: sbp.NdSbp, path: str):
        self.nd_sbp = nd_sbp
        self.path = path


def check_activation(placement: Placement, nd_sbp: sbp.NdSbp, shape: Sequence[int | None], path: str) -> None:
    """Check the layout that an `activations` rule asks for.

    Args:
        placement: the ranks.
        nd_sbp: one sbp for each axis of the placement.
        shape: shape of the layer's output; None for a length that is not known yet.
        path: the layer's path.

    Raises:
        FlowError: a partial sum, or a dim that the output does not have.
    """
    where = f"activations: output of {path.removesuffix('/output')!r}"
    ndim = len(shape)
    for axis, part in zip(placement.axis_names, nd_sbp, strict=True):
        if isinstance(part, sbp.PartialSum):
            raise FlowError(f"{where}: partial_sum on axis {axis!r}; the output of a layer is split or broadcast")
        if isinstance(part, sbp.Split) and not -ndim <= part.dim < ndim:
            raise FlowError(
                f"{where}: split({part.dim}) on axis {axis!r} needs a dimension that the shape {list(shape)} does not "
                + (f"have: {legal_dims(ndim)}" if ndim else "have")
            )


class Distribution(KerasDistribution):
    """Base class of distributions, with what a backend may ask of one; `keras_flow.parallel` has those that users make.

    It is no `abc.ABC`: `isinstance` of one costs more, and every hook calls `active`.

    Attributes:
        placement: the ranks.
        batch_axes: axes that split dimension 0 of every batch, in the order of the placement's.
        joined_axes: groups of axes that only ever split one dim together.
        strict: whether a split that cannot be held is an error.
        mirrored_view: whether rows may be computed by local tensors inside a layer's call.
        is_of_all_processes: whether each process of the job drives some of its ranks, where it drives several.
        layers_stand_alone: whether a layer by itself can be trained under it; a pipeline needs stages.
        batch_statistics: `"global"` or `"replica"`: over which rows BatchNormalization takes its statistics.
        random: `"logical"` or `"stock"`: whose random numbers `keras.random` gives.
        strategy: an engine's own strategy that the user asked for by name, or None.
        zero_stage: what is split over the ranks that hold a variable alike; 0: nothing, 1: slots, 2: gradients too, 3:
            weights too.
        rematerialized: layers that are computed again in the backward pass, of the models that were checked.
        uneven_notice: warns once that the batch size does not divide.
    """

    # annotations, not values: a subclass sets them as it is made
    placement: Placement
    batch_axes: tuple[str, ...]
    joined_axes: tuple[tuple[str, ...], ...]
    strict: bool
    uneven_notice: UnevenNotice
    mirrored_view = False
    is_of_all_processes = True
    layers_stand_alone = True
    batch_statistics = "global"
    random = "stock"
    strategy: str | None = None
    zero_stage = 0
    rematerialized: Collection[keras.Layer] = ()

    #: how many scopes of it are open
    open_scopes = 0
    #: of a part of a pipeline: the first rank of the stages whose variables it lays
    stage_rank: int | None = None
    #: of a part of a pipeline: the ranks that hold its variables, of each process one; the placement has this process's
    holders: tuple[int, ...] = ()
    _whole: Distribution | None = None

    @property
    def whole(self) -> Distribution:
        """The distribution that this one is a part of: of a pipeline's stage the pipeline, otherwise itself."""
        return self._whole or self

    @whole.setter
    def whole(self, whole: Distribution) -> None:
        self._whole = whole

    def build_for(self, model: keras.Model, x: object) -> None:
        """Build a model for its data, where `own_steps` need its layers; Keras itself does so later."""

    def own_steps(self, model: keras.Model) -> AbstractContextManager[object] | None:
        """Inside, Keras's loops run steps that this distribution makes; None where the engine's are run."""
        return None

    def finish_steps(self, model: keras.Model) -> None:
        """Wait for the updates of all steps that were made; where a step returns, those of most are."""

    @property
    def gathers_weights(self) -> bool:
        """Whether a rank holds a part of what it uses of a weight, and gathers it for its use (`zero=3`)."""
        return self.zero_stage >= 3

    @property
    def num_model_replicas(self) -> int:
        """Into how many blocks a batch is split."""
        return math.prod(self.placement.axis_size(axis) for axis in self.batch_axes)

    @property
    def parts_of_batch(self) -> int:
        """Into how many parts the rows of a batch are cut: for ranks, and in a pipeline for micro-batches as well."""
        return self.num_model_replicas

    @property
    def has_one_rank(self) -> bool:
        """Whether there is one rank alone: training is then left to Keras's own code."""
        return self.placement.size == 1

    def batch_plan(self, rows: int) -> BatchPlan:
        """How a batch of `rows` rows divides over the data ranks."""
        return BatchPlan(rows, self.num_model_replicas)

    def ensure_entered(self) -> None:
        """Check devices and align the ranks' random states, unless that was done."""
        raise NotImplementedError

    def get_variable_layout(self, variable: keras.Variable) -> KerasLayout:
        """The layout of a variable: the one that it carries, otherwise the one that it gets when it is created."""
        raise NotImplementedError

    def layout_for(
        self, path: str, shape: tuple[int, ...], layer: keras.Layer | None = None, dtype: str = "float32"
    ) -> KerasLayout:
        """The layout that a variable of this path, shape and dtype gets."""
        raise NotImplementedError

    def slot_layout(self, layout: KerasLayout) -> KerasLayout:
        """The layout that an optimizer's slots have, of a variable with this one."""
        return layout

    def engine_layout(self, layout: Layout) -> object:
        """The engine's description of a layout."""
        raise NotImplementedError

    def batch_layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a batch tensor [rows, ...]: rows over the batch axes where they divide, otherwise broadcast."""
        raise NotImplementedError

    def adopt(self, model: keras.Model, *others: object) -> bool:
        """Give every variable that a model reaches its layout under this distribution.

        Args:
            model: the model.
            others: objects used with it, as callbacks are; what they reach is laid too.

        Returns:
            Whether the layout of any of them changed.
        """
        raise NotImplementedError

    def lay_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Give slots that were made elsewhere the layouts of their variables, unless all were laid already."""
        raise NotImplementedError

    def warn_of_idle_axes(self, model: keras.Model) -> None:
        """Warn once of axes over which nothing of a model is split; by default each has its use."""

    def check(self, model: keras.Model) -> None:
        """Raise all layout problems of a model together.

        Raises:
            LayoutError: there are some.
        """
        raise NotImplementedError

    @property
    def has_problems(self) -> bool:
        """Whether layout problems wait to be raised."""
        raise NotImplementedError

    def record(self, path: str, problem: str) -> None:
        """Keep a problem of the layer output with this path, which a call raises now."""
        raise NotImplementedError

    def verified(
        self, model: keras.Model, fit: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of `fit`, after their first batch was verified if the user asked for that (`verify=`)."""
        return args, kwargs


def active() -> Distribution | None:
    """The active keras_flow distribution, or None."""
    current = current_distribution()
    return current if isinstance(current, Distribution) else None


#: the distribution whose step runs without it (one rank alone, a replica)
_left_out: ContextVar[Distribution | None] = ContextVar("keras_flow_left_out", default=None)


def as_under(distribution: Distribution) -> AbstractContextManager[None]:
    """Inside, a step draws and computes again as the distribution says, though the distribution is not active."""
    return setting(_left_out, distribution)


def applied() -> Distribution | None:
    """The active keras_flow distribution, otherwise the one whose step runs without it, otherwise None."""
    return active() or _left_out.get()


@contextmanager
def holding(distribution: Distribution | None) -> Iterator[None]:
    """Let a distribution, or none, be the active one inside; unlike a scope this needs no other process."""
    before = current_distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def expected() -> Distribution:
    """The active keras_flow distribution, for code that runs only inside a step under one.

    Raises:
        LookupError: there is none.
    """
    distribution = active()
    if distribution is None:
        raise LookupError("no keras_flow distribution is active")
    return distribution
