"""Batches on JAX of which each of several processes reads its own rows; in one process they are read as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_flow.backends import leaves
from keras_flow.backends.jax.devices import world
from keras_flow.backends.reading import row_order, sources
from keras_flow.backends.reading.process_rows import ProcessRows, ReadingEngine
from keras_flow.current.distribution import active
from keras_flow.current.keras_places import array_slicing
from keras_flow.layout import Layout


def part_of_batches(*args: object, **kwargs: object) -> ProcessRows | None:
    """The rows that this process reads, where there are several."""
    distribution, here = active(), world()
    if distribution is None or here.process_count == 1 or distribution.num_model_replicas == 1:
        return None
    # a batch with a row for each block says which blocks the ranks of this process compute
    blocks = distribution.num_model_replicas
    layout: Layout = distribution.batch_layout((blocks,))
    own = [layout.local_slices(rank)[0].start for rank in here.local_ranks if rank in distribution.placement.ranks]
    if not own:
        return None
    word = "rank" if here.process_count == here.size else "process"
    return ProcessRows(blocks, min(own), max(own), "padded", word)


def loader(part: ProcessRows, whole: Callable[[Any], Any], adapter: object) -> Iterable:
    """Batches of which this process reads its rows."""
    return iter(sources.batches(part, _ENGINE, whole, adapter))


def ordered(original: Callable[[Any], Any], adapter: Any) -> Iterator[object]:
    """Batches of arrays in the order of the epoch."""
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    for rows in row_order.batches(adapter):
        yield leaves.mapped(
            lambda array, rows=rows: array.convert_to_jax_compatible(array[rows]), inputs, none_is_leaf=False
        )


def _on_host(value: Any) -> Any:
    # JAX would put what it is given on a device first; scalars and sparse values stay as they are
    return value if isinstance(value, jax.Array) or not hasattr(value, "__array__") else np.asarray(value)


_ENGINE = ReadingEngine(
    "jax", from_sliced=lambda array, sliced: array.convert_to_jax_compatible(sliced), from_host=_on_host
)

READER = sources.AdapterReader("get_jax_iterator", part_of_batches, loader, ordered)
