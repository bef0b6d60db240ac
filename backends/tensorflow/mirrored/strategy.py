"""MirroredStrategy on TensorFlow: `kf.DataParallel(strategy="mirrored")`.

Each replica computes its own rows (the balanced split of the batch), and `replica_math` makes the results those of the
logical batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (  # pyright: ignore[reportMissingImports]
    collective_all_reduce_strategy,
)

from keras_flow.backends.files import shared_files
from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow.devices import host_device, rank_devices, world
from keras_flow.backends.tensorflow.mesh_variables import is_watched
from keras_flow.backends.tensorflow.processes import JOB, addresses, joined
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.variable_layout import KerasLayout, keras_layout
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

#: attribute of what extends a strategy that is ours
_OURS = "_keras_flow"


def works_by_dtensor(distribution: Distribution) -> bool:
    """Whether variables are on a mesh: not under a strategy, and not where there is one rank only."""
    return not is_mirrored(distribution) and not distribution.has_one_rank


def is_mirrored(distribution: Distribution) -> bool:
    """Whether a distribution works by MirroredStrategy."""
    return distribution.strategy == "mirrored"


def is_mirrored_variable(value: object) -> bool:
    """Whether a variable has a copy on each replica."""
    return isinstance(value, tf.distribute.DistributedValues)


def strategy_of(distribution: Distribution) -> tf.distribute.MirroredStrategy:
    """The strategy over the devices of a distribution's placement."""
    return _strategy(distribution.placement)


def foreign_strategy(strategy: tf.distribute.Strategy, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `Strategy.scope`: the active distribution, where the strategy is none of ours."""
    distribution = active()
    if distribution is None or hasattr(strategy.extended, _OURS):
        return None
    # TensorFlow enters the scope of no strategy by itself; its class has no public name
    return None if type(strategy).__name__ == "_DefaultDistributionStrategy" else distribution


@hook(
    "tensorflow.python.distribute.distribute_lib",
    "StrategyBase.scope",
    "a strategy of the user's inside a distribution's scope: its variables and steps would wait for ever",
    when=foreign_strategy,
)
def refuse_strategy(distribution: Distribution, original: Callable[..., object], strategy: object) -> object:
    """Hook on `Strategy.scope`: two ways to split one batch wait for each other for ever.

    Raises:
        FlowError: always.
    """
    raise FlowError(
        f"the scope of {type(strategy).__name__} of tf.distribute is entered inside that of {distribution!r}, or by a "
        "model that was made in it: a batch is split by one of them. Use the strategy outside of keras_flow's scope, "
        "or leave it out and make the model under kf.DataParallel (its strategy='mirrored' is a MirroredStrategy)"
    )


def refuse_inside_strategy(distribution: Distribution) -> None:
    """Refuse a scope of ours inside that of a strategy.

    Raises:
        FlowError: a strategy's scope is entered that is none of ours.
    """
    if tf.distribute.has_strategy() and not hasattr(tf.distribute.get_strategy().extended, _OURS):
        raise FlowError(
            f"the scope of {distribution!r} is entered inside that of {type(tf.distribute.get_strategy()).__name__} of "
            "tf.distribute: a batch is split by one of them. Leave the strategy's scope first"
        )


@functools.lru_cache(maxsize=64)
def _strategy(placement: Placement) -> tf.distribute.MirroredStrategy:
    if joined().count > 1:
        return _across_processes(placement)
    kind = (placement.type or "cpu").upper()
    # All strategies of a process number their collectives from one base, and two of different sizes then abort each
    # other ("joining a group with size3, but that group has size4"). Private; checked with TensorFlow 2.21.
    base = 1_000_000 * (1 + _strategy.cache_info().currsize)
    own = type("MirroredStrategy", (tf.distribute.MirroredStrategy,), {"_collective_key_base": base})
    strategy = own([f"{kind}:{rank}" for rank in placement.ranks])
    # Variables are updated inside the replica instead of in a merge call, which cannot stand inside `tf.cond` (moving
    # averages of weights, gradient accumulation). Private; checked with TensorFlow 2.21.
    strategy.extended._use_merge_call = lambda: False
    setattr(strategy.extended, _OURS, True)
    return strategy


def _across_processes(placement: Placement) -> tf.distribute.MultiWorkerMirroredStrategy:
    """MultiWorkerMirroredStrategy over the processes that have joined: each is a worker with a replica for each rank.

    Raises:
        FlowError: the placement is not all ranks of the job, in their order.
    """
    described, here = joined(), world()
    if placement.ranks != tuple(range(here.size)):
        raise FlowError(
            f'strategy="mirrored" across processes is TensorFlow\'s MultiWorkerMirroredStrategy, which takes all '
            f"{here.size} ranks of the job in their order; the placement has ranks {list(placement.ranks)}. Leave "
            "strategy out: DTensor takes any, with the same numbers"
        )
    cluster = tf.train.ClusterSpec({JOB: list(addresses())})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type=JOB, task_id=described.index, rpc_layer="grpc"
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    # The processes are servers of one cluster already, started for DTensor: the strategy would start another one in
    # each, and a thread that asks whether the others live, which the launcher and the coordination service do. Of
    # virtual CPUs it would take the first one alone. Private; checked with TensorFlow 2.21.
    kind = here.type.upper()
    changes: dict[str, Any] = {
        "_local_or_standalone_client_mode": True,
        "_enable_check_health": False,
        "_initialize_local_devices": lambda _, resolver, worker: (
            tuple(f"{worker}/device:{kind}:{number}" for number in range(len(here.local_ranks))),
            kind,
        ),
    }
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    with mock.patch.multiple(extended, create=True, **changes):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    strategy.extended._use_merge_call = lambda: False
    setattr(strategy.extended, _OURS, True)
    return strategy


# ---- variables


def create(original: Callable[..., object], variable: keras.Variable, value: object, placed: KerasLayout) -> object:
    """Create a variable that is on no mesh: with a copy on each replica, or Keras's own on the device of one rank."""
    # outside of any graph: a variable that is made while a step is traced outlives the trace
    with tf.init_scope(), _made_on(placed.distribution):
        result = original(variable, value)
    variable._layout = placed
    return result


def _made_on(distribution: Distribution) -> AbstractContextManager[object]:
    if shared_files.writing.get():
        # Keras makes an optimizer to see what its files need not hold; across processes a variable is a collective
        return tf.device(host_device())
    if is_mirrored(distribution):
        return strategy_of(distribution).scope()
    return tf.device(rank_devices()[distribution.placement.ranks[0]])


def place(variable: keras.Variable, value: np.ndarray, layout: KerasLayout) -> None:
    """Make an existing variable of its value anew: a copy on each replica, or one plain variable for DTensor."""

    def make() -> None:
        made = tf.Variable(
            value,  # type: ignore[arg-type]  # TensorFlow's stub leaves out arrays
            dtype=variable._dtype,
            trainable=is_watched(variable),
            name=variable.name,
            aggregation=variable._map_aggregation(variable.aggregation),
            synchronization=variable._map_synchronization(variable.synchronization),
        )
        for copy in made.values if is_mirrored_variable(made) else (made,):
            # optimizers find their slots by it
            copy._unique_id = variable._value._unique_id  # type: ignore[attr-defined]
        variable._value = made

    if is_mirrored(layout.distribution):
        with tf.init_scope(), strategy_of(layout.distribution).scope():
            make()
        variable._layout = layout
    else:
        with tf.init_scope():
            make()


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """rank -> the copy of its replica, of the ranks of this process."""
    placed = keras_layout(variable)
    assert placed is not None  # made by `create` or `place`
    ranks = [rank for rank in placed.layout.placement.ranks if rank in world().local_ranks]
    copies = zip(ranks, variable._value.values, strict=True)
    return {rank: np.asarray(copy.read_value()) for rank, copy in copies}  # `numpy()` would copy
