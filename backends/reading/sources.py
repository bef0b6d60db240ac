"""Sources of data by Keras's adapters: which of them a process reads by its own rows, and the hooks that make it so."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras

from keras_flow.backends.hooking import Hook
from keras_flow.backends.reading import loaders, py_datasets, row_order
from keras_flow.backends.reading.process_rows import ArrayBatches, ProcessRows, ReadingEngine, say_whole
from keras_flow.backends.reading.tf_data import TfDataBatches
from keras_flow.current.distribution import active
from keras_flow.errors import warn

#: Keras's adapter of data of which a part cannot be asked for -> what and why
_WHOLE = {
    "GeneratorDataAdapter": ("the generator", "it yields batches as they are"),
    "GrainDatasetAdapter": ("the grain dataset", "its pipeline makes whole batches"),
}


def batches(part: ProcessRows, engine: ReadingEngine, original: Callable[[Any], Iterable], adapter: Any) -> Iterable:
    """The batches of one of Keras's adapters, of which this process reads its rows where their source gives parts.

    Args:
        part: which rows this process reads.
        engine: how they become values of a batch.
        original: Keras's method that gives the batches of an adapter to the engine.
        adapter: the adapter.

    Raises:
        FlowError: a DataLoader leaves each process other samples.
    """
    kind = type(adapter).__name__
    if kind == "ArrayDataAdapter":
        return ArrayBatches(adapter, original, part, engine)
    if kind == "PyDatasetAdapter" and isinstance(adapter.py_dataset, py_datasets.OwnRowsPyDataset):
        return py_datasets.PyDatasetBatches(adapter, part, engine)
    if kind == "TFDatasetAdapter":
        parts = TfDataBatches(adapter._dataset, part, engine)
        if not parts.why_whole:
            return parts
        say_whole("the tf.data.Dataset", parts.why_whole, part.word)
    if kind == "TorchDataLoaderAdapter":
        # asked for in each epoch: workers may stay, and are told once that a dataset draws
        if getattr(adapter, "_keras_flow_batches", None) is None:
            adapter._keras_flow_batches = loaders.batches(adapter._dataloader, part, engine)
        own = adapter._keras_flow_batches
        return original(adapter) if own is loaders.WHOLE else own
    whole = _WHOLE.get(kind)
    if whole is not None:
        source, why = whole
        say_whole(
            source, f"{why} (a PyDataset with a method rows, a DataLoader, and arrays are read by own rows)", part.word
        )
    return original(adapter)


@dataclass(frozen=True)
class AdapterReader:
    """How an engine reads Keras's adapters of data.

    Attributes:
        method: the adapter's method that gives its batches to the engine.
        part: adapter -> the part of batches that this process reads; None for whole batches.
        loader: called as `loader(part, original, adapter)` for batches of which this process reads its part.
        ordered: called as `ordered(original, adapter)` for batches of arrays in the order of the epoch.
    """

    method: str
    part: Callable[[object], ProcessRows | None]
    loader: Callable[[ProcessRows, Callable[[Any], Any], Any], object]
    ordered: Callable[[Callable[[Any], Any], Any], object]

    def made(self, _: object, original: Callable[..., Any], x: Any, *args: object, **kwargs: object) -> Any:
        """Hook on `get_data_adapter`: the adapter of a loop gives its batches as this engine reads them."""
        part = self.part(None)
        # before the adapter is made, which starts the workers of a dataset
        own = x if part is None or not isinstance(x, keras.utils.PyDataset) else py_datasets.own_rows(x, part)
        with warnings.catch_warnings(record=True) as said:  # at this line, which is none of the program's
            adapter = original(own, *args, **kwargs)
        for each in said:
            warn(str(each.message), each.category)
        if self.method not in vars(adapter):  # else an adapter of the user's, read before
            whole = getattr(type(adapter), self.method)
            # weak: a cycle would leave the arrays of a loop to the garbage collector
            found = weakref.ref(adapter)
            setattr(adapter, self.method, functools.partial(self._batches, whole, found))
            if hasattr(adapter, "_finite_generator"):
                adapter._finite_generator = functools.partial(_in_order, found)
        return adapter

    def _batches(self, whole: Callable[..., Any], found: Callable[[], Any], *args: object, **kwargs: object) -> object:
        """The batches of an adapter; asked for in each epoch."""
        adapter = found()

        def in_order(adapter: Any) -> object:
            is_ordered = type(adapter).__name__ == "ArrayDataAdapter" and row_order.shuffles(adapter)
            return self.ordered(whole, adapter) if is_ordered else whole(adapter, *args, **kwargs)

        part = self.part(adapter)
        return in_order(adapter) if part is None else self.loader(part, in_order, adapter)


def _in_order(found: Callable[[], Any]) -> Iterable:
    """The batches of an adapter of a PyDataset that has no workers."""
    adapter = found()
    if row_order.dataset_shuffles(adapter):
        return row_order.batches_of_dataset(adapter)
    return type(adapter)._finite_generator(adapter)


def _reads(*args: object, **kwargs: object) -> bool | None:
    """Condition of the hook: a distribution is active, or rows of a `fit` are ordered (of one rank none is active)."""
    return True if active() is not None or row_order.by_position() else None


def hooks(reader: AdapterReader) -> tuple[Hook, ...]:
    """The hooks on sources of data.

    Args:
        reader: how the engine reads them.
    """
    return (
        Hook(
            "keras:adapters",
            "get_data_adapter",
            reader.made,
            "a process reads its own rows of a batch, in the order of seed, epoch and position; Keras reads the whole "
            "batch in every process, in another order on each engine",
            when=_reads,
        ),
    )
