"""Data parallel: each rank computes its rows of the batch, with the results of the logical batch."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from keras_flow.backends.active import backend
from keras_flow.backends.keras_distribution import placement_of
from keras_flow.current import dry_run
from keras_flow.distributions.ranks import require_placement
from keras_flow.errors import FlowError
from keras_flow.parallel.tools import ExplainedDistribution
from keras_flow.placements import Placement


class DataParallel(ExplainedDistribution):
    """Every rank holds all variables, and computes its own rows of each batch.

    The numbers are those of one device on the same (global) batch: BatchNormalization takes global statistics, clipping
    acts on the summed gradient, dropout masks are those of one device (`random`), metrics count every row once.

    Args:
        placement: the ranks; None takes all of the job. A `keras.distribution.DeviceMesh`, or a
            `keras.distribution.DataParallel`, gives those that its devices name.
        strategy: the engine's own strategy: None takes the fastest one with the numbers of one device; `"mirrored"`
            asks TensorFlow for MirroredStrategy.
        batch_statistics: `"global"`: BatchNormalization takes the statistics of the whole batch. `"replica"`: those of
            each rank's rows, and the mean of them for its moving statistics.
        random: `"logical"` (the default): `keras.random` and initial weights give values that depend on the seed and
            the logical index alone, equal for every layout and every engine, of which a rank draws its part;
            `"stock"`: what stock Keras draws on one device with this engine. None takes what the environment variable
            KERAS_FLOW_RANDOM says, `"logical"` where it is not set.
        verify: `"first_batch"` proves on the first batch of a model's first `fit` that a step has the numbers of one
            device.
        zero: what else is split over the ranks of the batch. 0: nothing; 1: the optimizer's slots (momentums, averages,
            accumulated gradients); 2: gradients too, each as soon as it is known; 3: weights too, each gathered where
            it is used, as FSDP does it. The numbers stay those of one device; memory and bytes: docs/memory.md.
        zero_axes: the axes of the batch over which they are split; None takes all of them.
        zero_min_size: elements that a rank's part of a slot has at least; what is smaller stays whole.
        remat: layers whose inner results are not held for the backward pass but computed again: `"block"` for the
            repeated blocks of a model (as those of a transformer), or regular expressions of layer paths. The numbers
            stay the same, dropout too; memory and time: docs/memory.md.

    Raises:
        FlowError: a strategy that the active backend does not have, or any error of the placement.

    Example:
        >>> import keras, numpy as np, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.DataParallel().scope():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        ...     model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> history = model.fit(np.ones((8, 2)), np.zeros((8, 1)), batch_size=8, verbose=0)  # two rows for each rank
        >>> history.history["loss"]
        [4.0]
    """

    mirrored_view = True

    def __init__(
        self,
        placement: Placement | keras.distribution.DeviceMesh | keras.distribution.DataParallel | None = None,
        *,
        strategy: str | None = None,
        batch_statistics: str = "global",
        random: str | None = None,
        verify: str | None = None,
        zero: int = 0,
        zero_axes: str | Sequence[str] | None = None,
        zero_min_size: int = 1024,
        remat: str | Sequence[str] | None = None,
    ):
        if batch_statistics not in ("global", "replica"):
            raise FlowError(f'batch_statistics is "global" or "replica", got {batch_statistics!r}')
        # a strategy is refused here and not in `fit`, minutes later
        engine = backend()
        if strategy is not None and strategy not in engine.capabilities.strategies:
            raise FlowError(
                f"strategy={strategy!r} is not one of the {engine.name} backend's: "
                f"{sorted(engine.capabilities.strategies) or 'it has none by name'}; leave it out for the default"
            )
        given = placement.device_mesh if isinstance(placement, keras.distribution.DataParallel) else placement
        ranks = placement_of(given) if isinstance(given, keras.distribution.DeviceMesh) else given
        # in a dry run the ranks are those of the question, not of this machine
        if ranks is None:
            world = dry_run.world() or engine.world()
            ranks = Placement(range(world.size), axis_names=("data",))
        require_placement(ranks, type(self).__name__)
        self.strategy = strategy
        self.batch_statistics = batch_statistics
        if strategy == "mirrored" and zero:
            raise FlowError(
                f'zero={zero} cannot be used with strategy="mirrored": MirroredStrategy holds slots on every rank. '
                "Leave the strategy out"
            )
        super().__init__(
            ranks,
            batch_axes=ranks.axis_names,
            random=random,
            verify=verify,
            zero=zero,
            zero_axes=zero_axes,
            zero_min_size=zero_min_size,
            remat=remat,
        )
