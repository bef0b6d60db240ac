"""The job that is being traced, and the distribution that it turns out to need.

That is known when its function has asked for it, by a split variable or a second placement. The trace then begins
again under that distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import keras
import numpy as np

from keras_flow.compat.oneflow import session
from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.errors import FlowError
from keras_flow.parallel.data_parallel import DataParallel
from keras_flow.parallel.model_parallel import ModelParallel
from keras_flow.parallel.pipeline_parallel import PipelineParallel
from keras_flow.placements import Placement
from keras_flow.scoped import setting

_current: ContextVar[TracedJob | None] = ContextVar("keras_flow_oneflow_trace", default=None)
#: one distribution for all jobs that need such a one, since they share variables
_distributions: dict[Need, FlowDistribution] = {}


@dataclass(frozen=True)
class Need:
    """The distribution that a job needs: rows alone are split, variables too, or there are stages.

    Attributes:
        kind: which of the three.
        ranks: those of the job; empty: all.
        hierarchy: the grid of the ranks; empty: a row.
        microbatches: how many a job with stages has.
    """

    kind: Literal["data", "model", "stages"] = "data"
    ranks: tuple[int, ...] = ()
    hierarchy: tuple[int, ...] = ()
    microbatches: int = 1

    def distribution(self) -> FlowDistribution:
        """The distribution, made once."""
        if self not in _distributions:
            ranks = self.ranks or tuple(range(session.start().size))
            if self.kind == "stages":
                pipe = Placement(ranks, axis_names=("pipe",))
                made = PipelineParallel(pipe, microbatches=self.microbatches, schedule="gpipe")
            elif self.kind == "data":
                made = DataParallel(Placement(ranks, axis_names=("data",)))
            else:
                grid = np.reshape(ranks, self.hierarchy or -1)
                names = ("data", *(f"axis{number}" for number in range(1, grid.ndim)))
                made = ModelParallel(Placement(grid.tolist(), axis_names=names))
            _distributions[self] = made
        return _distributions[self]


class TraceAgain(Exception):
    """The job needs another distribution than the one under which it is traced."""

    def __init__(self, need: Need) -> None:
        super().__init__(need)
        self.need = need


@dataclass
class TracedJob:
    """The state of a job function that is being traced: what it has said so far.

    Attributes:
        job: its name.
        is_training: whether it is a train job.
        is_mirrored: whether its view is the mirrored one.
        need: what it is traced for.
        dtype: the dtype of variables.
        make_optimizer: makes the optimizer that `config.train` names.
        input: the input of its first placeholder.
        placed: the placements that were opened.
        names: names of the layers that were called.
        namespaces: those that are open, the outer one first.
        modes: each layer as this job has it, its variables' regularizers by name and whether it trains.
        watched: values, each with the function that is called with it.
        minimized: the loss, and the function that makes its optimizer.
    """

    job: str
    is_training: bool
    is_mirrored: bool
    need: Need
    dtype: str
    make_optimizer: Callable[[], Any]
    input: Any = None
    placed: list[tuple[int, ...]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    namespaces: list[str] = field(default_factory=list)
    modes: list[tuple[keras.Layer, Mapping[str, Any], bool]] = field(default_factory=list)
    watched: list[tuple[Any, Callable[[Any], object]]] = field(default_factory=list)
    minimized: tuple[Any, Callable[[], Any]] | None = None

    def take_modes(self) -> None:
        """Make the layers train, and be regularized, as this job says: others may say otherwise."""
        for layer, regularizers, trains in self.modes:
            layer.trainable = trains
            for variable in layer.variables:
                variable.regularizer = regularizers.get(variable.name)

    def require(self, **changes: Any) -> None:
        """Begin again, unless the job is traced under such a distribution.

        Raises:
            FlowError: its view allows none.
        """
        needed = replace(self.need, **changes)
        if self.is_mirrored and needed.kind != "data":
            raise FlowError(f"job {self.job!r}: split variables and stages need flow.scope.consistent_view()")
        if self.need.kind == "stages" and needed.kind == "model":
            raise FlowError(
                f"job {self.job!r} opens several placements, which are stages: its variables cannot be split too"
            )
        if needed != self.need:
            raise TraceAgain(needed)


def current(who: str) -> TracedJob:
    """The job that is being traced.

    Raises:
        FlowError: none is.
    """
    trace = _current.get()
    if trace is None:
        raise FlowError(
            f"{who} is part of a job: call it in a function under @flow.global_function. Outside of jobs Keras's "
            "layers and kf.ops compute"
        )
    return trace


def is_inside() -> bool:
    """Whether a job is being traced."""
    return _current.get() is not None


def tracing(trace: TracedJob) -> AbstractContextManager[None]:
    """Inside, operations belong to a job."""
    return setting(_current, trace)


def forget() -> None:
    """Forget the distributions of the session's jobs."""
    _distributions.clear()
