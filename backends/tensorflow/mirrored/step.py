"""Steps of `strategy="mirrored"`: a replica runs Keras's step on its own rows; refused where rows may mix."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import tree

from keras_flow.backends import states
from keras_flow.backends.hooking import hook
from keras_flow.backends.reading import batch_watch
from keras_flow.backends.reading.batch_watch import BatchWatch
from keras_flow.backends.row_wise import own_code, row_interaction, row_operations, row_sums
from keras_flow.backends.tensorflow.data import to_tensors
from keras_flow.backends.tensorflow.devices import host_device
from keras_flow.backends.tensorflow.mirrored.replica_math import ReplicaRows, rows_here
from keras_flow.backends.tensorflow.mirrored.strategy import is_mirrored, shards, strategy_of
from keras_flow.backends.tensorflow.processes import joined
from keras_flow.backends.tensorflow.traced_step import compiled
from keras_flow.backends.tensorflow.trainer import (
    MOST_TRACES,
    LoopSource,
    build,
    build_for_prediction,
    in_turn,
    predicted,
)
from keras_flow.current.distribution import Distribution, as_under
from keras_flow.current.models import distribution_of_functions, has_own, with_inner
from keras_flow.errors import FlowError
from keras_flow.layout import balanced


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
        self._source = LoopSource()
        self._watch = BatchWatch()

    def __call__(self, data: object, source: object = None) -> object:
        """Run one step on host data, which came from `source` (an iterator, a loop); results are logical tensors."""
        if source is None or self._source.begins(source):
            own_code.look_at_classes()
            self._watch.restart(None)
        (batch_watch.of_single_batches() or self._watch).see(data)
        _refuse_what_mixes_rows(self.model)
        (build_for_prediction if self.joined else build)(self.model, data)
        if not self.joined:
            _refuse_sums_of_rows(self.model)
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
        key = (total, *((path, leaf is None) for path, leaf in tree.flatten_with_path(structure)))
        if key not in self._functions:
            if len(self._functions) == MOST_TRACES:
                del self._functions[next(iter(self._functions))]  # the oldest
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
            with rows_here(rows), as_under(self.distribution):
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
        given = getattr(self.model, "optimizer", None)
        for optimizer in () if given is None else with_inner(given):
            optimizer._distribution_strategy = self.strategy
            counter = getattr(optimizer, "_iterations", None)
            if counter is not None:
                # Every replica counts alike. Keras lets the first one count for all, by a merge call, which cannot
                # stand inside the `tf.cond` of a loss scale. Private; checked with TensorFlow 2.21.
                counter._value._aggregation = tf.VariableAggregation.NONE


_INSTEAD = "use the default strategy (kf.DataParallel() without strategy), which computes the logical batch as one"
#: the one kind of interaction that replicas compute exactly (`replica_math`): what is not proven row-wise mixes rows
_EXACT = "added loss"


def _refuse_what_mixes_rows(model: keras.Model) -> None:
    """Raise for a model whose rows may interact: a replica sees its own rows only.

    Raises:
        FlowError: a layer, operation or step that is not Keras's own or works along the rows.
    """
    # such a method may gather, index or compare rows by itself, which nothing here can see
    for name in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        if has_own(model, name):
            raise FlowError(f'strategy="mirrored": model {model.name!r} has its own {name}; {_INSTEAD}')
    for layer in model._flatten_layers():
        interaction = row_interaction.of_layer_itself(layer)
        if interaction is not None and interaction.kind != _EXACT:
            raise FlowError(
                f'strategy="mirrored": rows may interact in layer {layer.name!r} ({type(layer).__name__}), and a '
                f"replica sees its own rows only ({interaction.text}); {_INSTEAD}"
            )
        # eager replicas take turns, and a layer keeps the losses of its last call alone
        if interaction is not None and model.run_eagerly:
            raise FlowError(
                f'strategy="mirrored" with run_eagerly=True: {interaction.text}, and a replica would take that of '
                f"another; compile the model without run_eagerly, or {_INSTEAD}"
            )
        # the graph of a functional model has operations that belong to no layer
        for interaction in row_operations.of_operations(layer):
            if interaction.kind != _EXACT:
                operation = f" in operation {interaction.operation}" if interaction.operation else ""
                raise FlowError(
                    f'strategy="mirrored": rows may interact{operation} of model {model.name!r}, and a replica sees '
                    f"its own rows only ({interaction.text}); {_INSTEAD}"
                )


def _refuse_sums_of_rows(model: keras.Model) -> None:
    """Raise for a built loss or metric that is not known to add up rows: each replica adds up its own.

    Raises:
        FlowError: naming it.
    """
    rank = min((len(output.shape) for output in getattr(model, "outputs", None) or ()), default=0)
    for kind in ("loss", "metric"):
        for interaction in row_sums.of_compiled(model, kind, rank):
            raise FlowError(f'strategy="mirrored": rows may interact: {interaction.text}; {_INSTEAD}')


def functions_by_strategy(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hooks that make a model's functions: its distribution, where that is of replicas."""
    distribution = distribution_of_functions(model)
    return distribution if distribution is not None and is_mirrored(distribution) else None


@hook(
    "keras.Model",
    "_make_function",
    "rows are cut by the balanced split, metrics are read across replicas (Keras: the mean of results)",
    when=functions_by_strategy,
)
def make_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, step: Callable
) -> Callable:
    """Hook on `TensorFlowTrainer._make_function`: steps of replicas.

    Several steps are a loop here, because Keras's `while_loop` fails.
    """
    # `joined`: outputs of the replicas are put together, which only `predict` asks for
    steps = MirroredSteps(model, step, distribution, joined=False)

    return in_turn(model, steps)


@hook(
    "keras.Model",
    "make_predict_function",
    "rows are cut by the balanced split, and results joined in the order of rows",
    when=functions_by_strategy,
)
def make_predict_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, force: bool = False
) -> None:
    """Hook on `TensorFlowTrainer.make_predict_function`: steps of replicas."""
    if model.predict_function is not None and not force:
        return
    model.predict_function = predicted(MirroredSteps(model, model.predict_step, distribution, joined=True))
