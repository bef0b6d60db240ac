"""`kf.scope`: which ranks compute the layers that are made inside, as in OneFlow's `scope.placement`.

Example:
    >>> import keras, keras_flow as kf
    >>> ranks = kf.init(4)
    >>> with kf.scope.placement("cpu", "0:1"):
    ...     layer = keras.layers.Dense(2)
    ...     layer.build((None, 4))
    >>> kf.layout_of(layer.kernel).layout.placement.ranks
    (1,)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from keras_flow.backends.active import backend
from keras_flow.current.distribution import active
from keras_flow.errors import FlowError
from keras_flow.parallel import said_ranks
from keras_flow.placements import Placement
from keras_flow.runtime.placement import placement as placement_of

if TYPE_CHECKING:
    from keras_flow.parallel.pipeline_parallel import PipelineParallel

#: the distribution of programs that open no scope of one, by the ranks of the job
_by_itself: dict[tuple[int, str], PipelineParallel] = {}


@contextmanager
def placement(*where: str | int | Placement) -> Iterator[None]:
    """Layers that are made inside, with their weights, belong to these ranks: they are a stage there.

    Under `kf.PipelineParallel` the stages are those that were said. Without it the model is placed by hand: `fit`
    trains it with one micro-batch, so the stages compute one after the other. Several ranks share the rows of a stage;
    each stage then has as many.

    Args:
        where: a rank; or OneFlow's device type and `"host:device"`; or a `kf.Placement`.

    Raises:
        FlowError: there is no such rank, or another distribution is active.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> inputs = keras.Input((4,))
        >>> with kf.scope.placement("cpu", "0:0"):
        ...     hidden = keras.layers.Dense(8)(inputs)
        >>> with kf.scope.placement("cpu", "0:1"):
        ...     outputs = keras.layers.Dense(2)(hidden)
        >>> model = keras.Model(inputs, outputs)
        >>> [kf.layout_of(layer.kernel).layout.placement.ranks for layer in model.layers[1:]]
        [(0,), (1,)]
    """
    ranks = _ranks_of(where)
    with nullcontext() if active() is not None else _implicit().scope():
        distribution = active()
        refuse = getattr(distribution, "refuse_ranks", None)
        if refuse is None:
            raise FlowError(
                f"kf.scope.placement places the stages of a pipeline, and {distribution!r} has none. Open it under "
                "kf.PipelineParallel(...).scope(), or under no scope"
            )
        refuse(ranks)
        with said_ranks.saying(ranks):
            yield


def _implicit() -> PipelineParallel:
    """The distribution of a program that places layers by hand and opens no scope itself."""
    from keras_flow.parallel.pipeline_parallel import PipelineParallel

    world = backend().world()
    key = (world.size, backend().name)
    if key not in _by_itself:
        _by_itself[key] = PipelineParallel(microbatches=1, schedule="gpipe")
    return _by_itself[key]


def _ranks_of(where: Sequence[str | int | Placement]) -> tuple[int, ...]:
    world = backend().world()
    if len(where) not in (1, 2):
        raise FlowError('kf.scope.placement takes a kf.Placement, or a device type and ranks: ("cpu", "0:1")')
    *types, ranks = where
    ranks = [ranks] if isinstance(ranks, int) else ranks
    given = ranks if isinstance(ranks, Placement) else placement_of(str(types[0]) if types else world.type, ranks)
    if given.type not in (None, world.type):
        raise FlowError(f"kf.scope.placement: {given.type!r} is asked for, and this job runs on {world.type!r} devices")
    if max(given.ranks) >= world.size:
        raise FlowError(
            f"kf.scope.placement: there is no rank {max(given.ranks)}; the job has ranks 0 to {world.size - 1}"
        )
    return given.ranks
