"""Central storage: one copy of the variables, which every rank computes with."""

from __future__ import annotations

from keras_flow.backends.active import backend
from keras_flow.current import dry_run
from keras_flow.distributions.ranks import require_placement
from keras_flow.errors import FlowError
from keras_flow.parallel.pipeline_parallel import PipelineParallel
from keras_flow.placements import Placement


class CentralStorage(PipelineParallel):
    """Variables and slots are held once, by the first rank; all ranks compute rows of each batch with copies of them.

    In each step the weights go to the ranks, each computes its rows, their gradients are added up where the variables
    are, and one update is made there: `tf.distribute.experimental.CentralStorageStrategy`, with the numbers of one
    device. It is a pipeline of one stage with one micro-batch. Optimizers with large slots fit so where
    `kf.DataParallel` would hold them on every rank; each step sends all weights, which `kf.DataParallel` does not.

    The first rank of CPUs has its variables in host memory; that of accelerators in its own. On torch, where each rank
    is a process, the first process holds the variables and the others get them in messages.

    Args:
        placement: the ranks, along one axis; None takes all of the job.
        random: `"logical"` (the default) or `"stock"`, as for `kf.DataParallel`.

    Raises:
        FlowError: a placement of several axes, or ranks that do not exist.

    Example:
        >>> import keras, numpy as np, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.CentralStorage().scope():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        ...     model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> history = model.fit(np.ones((8, 2)), np.zeros((8, 1)), batch_size=8, verbose=0)  # two rows for each rank
        >>> history.history["loss"]
        [4.0]
        >>> kf.layout_of(model.layers[0].kernel).layout.placement.ranks
        (0,)
    """

    _first_holds_all = True

    def __init__(self, placement: Placement | None = None, *, random: str | None = None):
        if placement is None:
            placement = Placement(range((dry_run.world() or backend().world()).size), axis_names=("data",))
        require_placement(placement, type(self).__name__)
        if len(placement.hierarchy) != 1:
            raise FlowError(
                f"CentralStorage takes ranks along one axis, all of which share the rows of a batch; the placement has "
                f"the axes {list(placement.axis_names)}: kf.Placement({list(placement.ranks)})"
            )
        if backend().capabilities.drives_all_ranks and backend().world().process_count > 1:
            raise FlowError(
                f"CentralStorage on {backend().name} is for one process that drives all ranks: `keras-flow launch "
                "--nproc_per_node 1 --devices_per_proc N`; torch has a process for each rank"
            )
        (name,) = placement.axis_names
        # a pipeline has an axis of stages besides: here of one
        lanes = Placement([list(placement.ranks)], ("stages", name), placement.type)
        super().__init__(lanes, stages=1, microbatches=1, pipe_axis="stages", batch_axes=name, random=random)
