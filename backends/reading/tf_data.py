"""`tf.data` pipelines on every engine: batches are taken apart before anything expensive, where the pipeline allows it.

A pipeline that ends in `map(f).batch(n)` (and prefetches) is cut before `f`. What comes before gives the samples of the
logical batches in their order; this process keeps its rows of them, and applies `f` to these alone. What Keras makes of
`class_weight` follows. This needs an `f` that is a function of its sample alone, without random numbers and without
Python code. Every other pipeline makes whole batches, of which engines keep their rows.

Example: `files.shuffle(1000, seed=1).map(decode).batch(32)` in 4 processes: each shuffles all names, and decodes 8
files of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from keras import tree

from keras_flow.backends.reading.process_rows import ProcessRows, ReadingEngine
from keras_flow.current import keras_places
from keras_flow.current.keras_places import tensorflow as tf

#: classes of TensorFlow's datasets, private (checked with TensorFlow 2.21): those that leave batches as they are
_TRANSPARENT = ("_PrefetchDataset", "_OptionsDataset")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
_MAPS = ("_MapDataset", "_ParallelMapDataset")


class TfDataBatches:
    """The batches of a `tf.data.Dataset`, of which this process makes its rows.

    Args:
        dataset: the user's dataset of batches.
        part: which rows this process reads.
        engine: how they become values of a batch.

    Attributes:
        why_whole: why the pipeline cannot be taken apart, and batches are not to be read here; empty where it can.
    """

    def __init__(self, dataset: Any, part: ProcessRows, engine: ReadingEngine):
        self.dataset, self.part, self.engine = dataset, part, engine
        found, self.why_whole = _taken_apart(dataset)
        self.source, self.functions, self.batched, self.weights = found

    def __iter__(self) -> Iterator[object]:
        self.engine.begins()
        # an iterator that begins moves a shuffle on: it begins where that of one device does
        return self._parts(iter(self._own_rows(self.engine.seen())) if self.engine.makes_tf_data else None)

    def _parts(self, begun: Iterator | None) -> Iterator[object]:
        for number, rows, batch in begun or self._own_rows(self.engine.seen()):
            values = tree.map_structure(self.engine.from_host, batch, none_is_leaf=False)
            yield self.part.divided(values, int(number), int(rows))

    def _own_rows(self, seen: int) -> Any:
        """A dataset of (number, rows of the logical batch, those that this process reads)."""

        def of_batch(number: Any, batch: Any) -> Any:
            rows = tf.shape(tree.flatten(batch)[0], out_type=tf.int64)[0]
            indices = tf.numpy_function(self._indices, [number, rows], tf.int64, stateful=False)
            indices.set_shape([None])
            samples = tf.data.Dataset.from_tensor_slices(
                tree.map_structure(lambda leaf: tf.gather(leaf, indices), batch)
            )
            for function in self.functions:
                samples = samples.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            # one batch of them all
            own = samples.batch(tf.shape(indices, out_type=tf.int64)[0])
            for function in self.weights:
                own = own.map(function)
            is_tuple = type(own.element_spec) is tuple
            return own.map(lambda *own: (number, rows, own if is_tuple else own[0]))

        # a function is given what is in a tuple, also of one: a batch travels as one argument, by name
        is_tuple = type(self.source.element_spec) is tuple
        named = self.batched(self.source).map(lambda *values: {"batch": values if is_tuple else values[0]})
        batches = named.enumerate(seen)
        own = batches.flat_map(lambda number, batch: of_batch(number, batch["batch"]))
        return own.with_options(self.dataset.options()).prefetch(tf.data.AUTOTUNE)

    def _indices(self, number: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self.part.indices(int(number), int(rows))


class _Pipeline(NamedTuple):
    """A pipeline that was taken apart.

    Attributes:
        source: what comes before the functions of samples.
        functions: the functions of samples, in their order.
        batched: makes a dataset of batches of one of samples.
        weights: what Keras makes of `class_weight`, functions of batches by rows.
    """

    source: Any
    functions: list[Callable[..., Any]]
    batched: Callable[[Any], Any]
    weights: list[Callable[..., Any]]


def _taken_apart(dataset: Any) -> tuple[_Pipeline, str]:
    """The parts of a pipeline, or why it stays whole."""
    nothing = _Pipeline(None, [], lambda samples: samples, [])
    node, weights = dataset, []
    while (weighs := _weighs_classes(node)) or type(node).__name__ in _TRANSPARENT:
        if weighs:
            weights.insert(0, node._map_func._func)
        node = node._input_dataset
    if type(node).__name__ not in _BATCHES:
        return (
            nothing,
            f"it does not end in batch(), but in {type(node).__name__.strip('_')}, which makes whole batches",
        )
    batch = node
    functions: list[Callable[..., Any]] = []
    node = batch._input_dataset
    while type(node).__name__ in (*_MAPS, *_TRANSPARENT):
        if type(node).__name__ in _MAPS:
            if _has_state(node._map_func.function.graph) or not _is_dense(node):
                break
            functions.insert(0, _as_it_was_made(node._map_func))
        node = node._input_dataset
    if not _is_dense(node):
        return nothing, "its samples are sparse or ragged"
    if not all(spec.shape.is_fully_defined() for spec in tree.flatten(node.element_spec)):
        return nothing, "its samples have no fixed shape before they are transformed"

    def batched(samples: Any) -> Any:
        return samples.batch(batch._batch_size, drop_remainder=batch._drop_remainder)

    return _Pipeline(node, functions, batched, weights), ""


def _weighs_classes(node: Any) -> bool:
    """Whether it is what Keras makes of `class_weight`, which weighs each row by its own label."""
    if type(node).__name__ not in _MAPS:
        return False
    function = inspect.unwrap(node._map_func._func)
    return (function.__module__, function.__qualname__) == (
        keras_places.find("keras:tf_dataset_adapter").__name__,
        "make_class_weight_map_fn.<locals>.class_weights_map_fn",
    )


def _is_dense(dataset: Any) -> bool:
    return all(isinstance(spec, tf.TensorSpec) for spec in tree.flatten(dataset.element_spec))


def _as_it_was_made(function: Any) -> Callable[..., Any]:
    """The function of a `map`, as it was traced by then: a new trace would see the Python values of now."""

    def call(*args: Any) -> Any:
        return tf.nest.pack_sequence_as(function.output_structure, function.function(*tf.nest.flatten(args)))

    return call


def _has_state(graph: Any) -> bool:
    """Whether a function's operations do more than compute from their inputs: random numbers, Python, tables."""
    graphs = [graph, *(function.graph for function in graph._functions.values() if hasattr(function, "graph"))]
    return any(
        operation.op_def.is_stateful for each in graphs for operation in each.get_operations() if operation.op_def
    )
