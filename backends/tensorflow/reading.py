"""Batches on TensorFlow of which each of several processes reads its own rows; in one process `tf.data` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_flow.backends.reading import row_order, sources
from keras_flow.backends.reading.process_rows import ProcessRows, ReadingEngine, one_ahead
from keras_flow.backends.tensorflow.data import batch_axis
from keras_flow.backends.tensorflow.devices import world
from keras_flow.backends.tensorflow.layouts import view_of
from keras_flow.backends.tensorflow.mirrored.strategy import is_mirrored
from keras_flow.current.distribution import active


def part_of_batches(*args: object, **kwargs: object) -> ProcessRows | None:
    """The rows that this process reads, where there are several."""
    distribution, here = active(), world()
    if distribution is None or here.process_count == 1 or is_mirrored(distribution):
        return None
    view = view_of(distribution)
    axis, blocks = batch_axis(distribution, view)
    # where DTensor splits rows by some of the batch axes only, they are read whole
    if axis is None or blocks != distribution.num_model_replicas or blocks == 1:
        return None
    own = [where[axis] for where in view.mesh.local_device_locations()]
    if not own:
        return None
    word = "rank" if here.process_count == here.size else "process"
    return ProcessRows(blocks, min(own), max(own), "whole", word)


class OwnRowsDataset:
    """In the place of a `tf.data.Dataset`: batches of which this process reads its rows, the next one ahead.

    Args:
        batches: the batches.
        count: how many they are; None where it is not known.
    """

    def __init__(self, batches: Iterable, count: int | None):
        self.batches, self.count = batches, count

    def __iter__(self) -> OwnRowsIterator:
        # tf.data itself reads ahead
        ahead = self.batches if isinstance(self.batches, tf.data.Dataset) else one_ahead(iter(self.batches))
        return OwnRowsIterator(iter(ahead), self.count)


class OwnRowsIterator:
    """One loop over the batches.

    Args:
        iterator: iterates over the batches.
        batches: how many there are, which processes compare.
    """

    def __init__(self, iterator: Iterator, batches: int | None):
        self.iterator, self.batches = iterator, batches

    def __iter__(self) -> OwnRowsIterator:
        return self

    def __next__(self) -> object:
        return next(self.iterator)


def loader(part: ProcessRows, whole: Callable[[Any], Any], adapter: Any) -> OwnRowsDataset:
    """Batches of which this process reads its rows."""
    return OwnRowsDataset(sources.batches(part, _ENGINE, whole, adapter), adapter.num_batches)


def ordered(original: Callable[[Any], tf.data.Dataset], adapter: Any) -> tf.data.Dataset:
    """Keras's pipeline, which shuffles numbers of rows, in another order.

    Keras shuffles all numbers as an epoch begins, or those of a batch.
    """
    within_batches = adapter._shuffle == "batch"
    order: Any = None

    def rows(numbers: np.ndarray) -> np.ndarray:
        nonlocal order
        # one for a pass: a thread makes its batches ahead, perhaps in another epoch than the first
        if not within_batches or numbers[0] == 0 or order is None:
            order = row_order.EpochOrder(adapter._num_samples, adapter._batch_size, within_batches)
        return order.at(numbers)

    def shuffled(numbers: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        found = tf.numpy_function(rows, [numbers], tf.int64)
        found.set_shape(numbers.shape)
        return found

    # while Keras writes its pipeline: since 3.16 by a method of its own, before that by TensorFlow's function
    place, name = (adapter, "_tf_shuffle") if hasattr(adapter, "_tf_shuffle") else (tf.random, "shuffle")
    stock = getattr(place, name)
    setattr(place, name, shuffled)
    try:
        return original(adapter)
    finally:
        setattr(place, name, stock)


def _on_host(value: Any) -> Any:
    if not hasattr(value, "__array__") or isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return value
    return np.asarray(value)


_ENGINE = ReadingEngine(
    "numpy",
    from_sliced=lambda array, sliced: array.convert_to_numpy(sliced),
    from_host=_on_host,
    makes_tf_data=True,
)

READER = sources.AdapterReader("get_tf_dataset", part_of_batches, loader, ordered)
