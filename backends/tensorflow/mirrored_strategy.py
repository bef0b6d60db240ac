"""MirroredStrategy on TensorFlow: `kf.DataParallel(strategy="mirrored")`.

Each replica computes its own rows (the balanced split of the batch), and `replica_math` makes the results those of the
logical batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.python.distribute import (  # pyright: ignore[reportMissingImports]
    collective_all_reduce_strategy,
)

from keras_flow.backends import logical_random, own_code, row_interaction, row_operations, shared_files, states
from keras_flow.backends.tensorflow.devices import host_device, rank_devices, world
from keras_flow.backends.tensorflow.processes import JOB, addresses, joined
from keras_flow.backends.tensorflow.replica_math import ReplicaRows, rows_here
from keras_flow.backends.tensorflow.traced_step import compiled
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.variable_layout import KerasLayout, keras_layout
from keras_flow.errors import FlowError
from keras_flow.layout import balanced
from keras_flow.placements import Placement

#: attribute of what extends a strategy that is ours
_OURS = "_keras_flow"


def works_by_dtensor(distribution: Distribution) -> bool:
    """Whether variables are on a mesh: not under a strategy, and not where there is one rank only."""
    return not is_mirrored(distribution) and not distribution.has_one_rank


def is_mirrored(distribution: Distribution) -> bool:
    """Whether a distribution works by MirroredStrategy."""
    return distribution.strategy == "mirrored"


def distribution_by_strategy(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on steps of replicas: the active distribution, where it works by MirroredStrategy."""
    distribution = active()
    return distribution if distribution is not None and is_mirrored(distribution) else None


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


def place(variable: keras.Variable, layout: KerasLayout) -> None:
    """Move an existing variable: a copy on each replica, or one plain variable that DTensor then takes."""
    from keras_flow.backends.tensorflow.variables import to_host

    value = to_host(variable._value)

    def make() -> tf.Variable:
        return tf.Variable(
            value,  # type: ignore[arg-type]  # TensorFlow's stub leaves out arrays
            dtype=variable._dtype,
            trainable=variable.trainable,
            name=variable.name,
            aggregation=variable._map_aggregation(variable.aggregation),
            synchronization=variable._map_synchronization(variable.synchronization),
        )

    if is_mirrored(layout.distribution):
        with tf.init_scope(), strategy_of(layout.distribution).scope():
            variable._value = make()
        variable._layout = layout
    else:
        with tf.init_scope():
            variable._value = make()


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """rank -> the copy of its replica, of the ranks of this process."""
    placed = keras_layout(variable)
    assert placed is not None  # made by `create` or `place`
    ranks = [rank for rank in placed.layout.placement.ranks if rank in world().local_ranks]
    return {rank: copy.numpy() for rank, copy in zip(ranks, variable._value.values, strict=True)}


# ---- steps


class MirroredSteps:
    """A step method of a model, run on every replica.

    Args:
        model: the model.
        step: `train_step`, `test_step` or `predict_step`.
        distribution: where it runs.
        joined: whether the results are rows to be joined; if not, they are the metrics.
    """

    def __init__(self, model: keras.Model, step: Callable, distribution: Distribution, joined: bool):
        self.model = model
        self.step = step
        self.distribution = distribution
        self.strategy = strategy_of(distribution)
        self.joined = joined
        self._functions: dict[object, Callable] = {}
        self._compared = 0
        self._source: object = None

    def __call__(self, data: object, source: object = None) -> object:
        """Run one step on host data, which came from `source`; the results are logical tensors."""
        from keras_flow.backends.tensorflow.data import to_tensors
        from keras_flow.backends.tensorflow.trainer import build, build_for_prediction

        if source is None or source is not self._source:  # a loop begins
            own_code.look_at_classes()
            self._source = source
        _refuse_what_mixes_rows(self.model)
        (build_for_prediction if self.joined else build)(self.model, data)
        self._tell_optimizer()
        structure = to_tensors(data, self.model)
        flat = [leaf for leaf in tree.flatten(structure) if leaf is not None]
        total = int(next(leaf.shape[0] for leaf in flat if leaf.shape.rank))
        parts = [self._part(flat, total, index) for index in range(self.strategy.num_replicas_in_sync)]
        # Keras would split a dataset by itself, and lose the rows that are left over
        values = [
            self.strategy.experimental_distribute_values_from_function(
                lambda context, leaf=leaf: parts[context.replica_id_in_sync_group][leaf]
            )
            for leaf in range(len(flat))
        ]
        key = (total, *(leaf is None for leaf in tree.flatten(structure)))
        if key not in self._functions:
            self._functions[key] = self._function(structure, total)
        outputs = self._functions[key](values)
        if self._compared < states.STEPS:
            self._compared += 1
            states.compare(self.model, shards)
        return tree.map_structure(functools.partial(self._join, total), outputs) if self.joined else outputs

    def _rows(self, total: int, index: int) -> tuple[int, int]:
        """Start and stop of the rows of a replica."""
        first, last = balanced(total, self.strategy.num_replicas_in_sync, index)
        # nothing is summed over predictions: a replica without rows repeats the first one, which `_join` leaves out
        return (0, 1) if self.joined and first == last else (first, last)

    def _part(self, flat: list[tf.Tensor], total: int, index: int) -> list[tf.Tensor]:
        first, last = self._rows(total, index)
        return [leaf[first:last] if leaf.shape.rank and leaf.shape[0] == total else leaf for leaf in flat]

    def _function(self, structure: object, total: int) -> Callable:
        present = [leaf is not None for leaf in tree.flatten(structure)]

        def on_replica(values: list[tf.Tensor]) -> object:
            # known as the replica is traced, so that its rows are a slice of fixed length
            index = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            first, last = self._rows(total, index)
            left = iter(values)
            data = tree.pack_sequence_as(structure, [next(left) if is_there else None for is_there in present])
            rows = ReplicaRows(first, last - first, total, self.distribution.batch_statistics)
            # a replica's thread has no distribution, which Keras keeps for each thread
            with rows_here(rows), logical_random.as_under(self.distribution):
                return self.step(data)

        def on_all(values: list[object]) -> object:
            outputs = self.strategy.run(on_replica, args=(values,))
            return outputs if self.joined else self.model.get_metrics_result()

        return on_all if self.model.run_eagerly else compiled(on_all)

    def _join(self, total: int, output: object) -> object:
        with tf.device(host_device()):
            if joined().count > 1:
                return self.strategy.gather(output, 0)[:total]
            # with fewer rows than replicas the first ones have a row each
            return tf.concat(self.strategy.experimental_local_results(output)[:total], 0)

    def _tell_optimizer(self) -> None:
        # Keras's optimizer looks for a strategy when it is made, which was outside of this one
        optimizer = getattr(self.model, "optimizer", None)
        while optimizer is not None:
            optimizer._distribution_strategy = self.strategy
            counter = getattr(optimizer, "_iterations", None)
            if counter is not None:
                # Every replica counts alike. Keras lets the first one count for all, by a merge call, which cannot
                # stand inside the `tf.cond` of a loss scale. Private; checked with TensorFlow 2.21.
                counter._value._aggregation = tf.VariableAggregation.NONE
            if optimizer.built:  # variables that were placed anew have new keys
                optimizer._trainable_variables_indices = {
                    optimizer._var_key(variable): index for index, variable in enumerate(optimizer._trainable_variables)
                }
            optimizer = getattr(optimizer, "inner_optimizer", None)


_INSTEAD = "use the default strategy (kf.DataParallel() without strategy), which computes the logical batch as one"
#: the one kind of interaction that replicas compute exactly (`replica_math`): what is not proven row-wise mixes rows
_EXACT = "added loss"


def _refuse_what_mixes_rows(model: keras.Model) -> None:
    """Raise for a model whose rows may interact: a replica sees its own rows only.

    Raises:
        FlowError: a layer, operation, loss, metric or step that is not Keras's own or works along the rows.
    """
    # such a step may gather, index or compare rows by itself, which nothing here can see
    if type(model).train_step is not keras.Model.train_step or type(model).test_step is not keras.Model.test_step:
        raise FlowError(f'strategy="mirrored": model {model.name!r} has its own train_step or test_step; {_INSTEAD}')
    for layer in model._flatten_layers():
        interaction = row_interaction.of_layer_itself(layer)
        if interaction is not None and interaction.kind != _EXACT:
            raise FlowError(
                f'strategy="mirrored": rows may interact in layer {layer.name!r} ({type(layer).__name__}), and a '
                f"replica sees its own rows only ({interaction.text}); {_INSTEAD}"
            )
        # the graph of a functional model has operations that belong to no layer
        for interaction in row_operations.of_operations(layer):
            if interaction.kind != _EXACT:
                operation = f" in operation {interaction.operation}" if interaction.operation else ""
                raise FlowError(
                    f'strategy="mirrored": rows may interact{operation} of model {model.name!r}, and a replica sees '
                    f"its own rows only ({interaction.text}); {_INSTEAD}"
                )
    parts = (getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None))
    # what the user named in `compile`, before Keras wraps it: a wrapper's class is always Keras's own
    asked = [
        getattr(part, name, None) for part in parts for name in ("_user_loss", "_user_metrics") if part is not None
    ]
    for function in tree.flatten(asked):
        # `LossFunctionWrapper` and `MeanMetricWrapper` hold a user's function under different names
        function = getattr(function, "fn", None) or getattr(function, "_fn", None) or function
        module = getattr(function, "__module__", None) or type(function).__module__
        # a name is one of Keras's own losses or metrics, whose sums over rows are scaled by replica
        if function is not None and not isinstance(function, str) and not module.startswith("keras."):
            name = getattr(function, "__name__", type(function).__name__)
            raise FlowError(f'strategy="mirrored": rows may interact in the loss or metric {name!r}; {_INSTEAD}')


def make_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, step: Callable
) -> Callable:
    """Hook on `TensorFlowTrainer._make_function`: steps of replicas.

    Several steps are a loop here, because Keras's `while_loop` fails.
    """
    # `joined`: outputs of the replicas are put together, which only `predict` asks for
    steps = MirroredSteps(model, step, distribution, joined=False)

    def function(iterator: Iterator) -> object:
        outputs = None
        for number in range(model.steps_per_execution):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise StopIteration from None
                break
            outputs = steps(data, iterator)
        return outputs

    return function


def make_predict_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, force: bool = False
) -> None:
    """Hook on `TensorFlowTrainer.make_predict_function`: steps of replicas."""
    if model.predict_function is not None and not force:
        return
    steps = MirroredSteps(model, model.predict_step, distribution, joined=True)

    def function(batches: list) -> object:
        outputs = [steps(data) for data in batches]
        return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    model.predict_function = function
