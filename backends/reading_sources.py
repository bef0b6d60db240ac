"""Sources of data by Keras's adapters: which of them a process reads by its own rows, and the hooks that make it so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from keras_flow.backends import reading_loaders, reading_py_datasets
from keras_flow.backends.hooking import Hook
from keras_flow.backends.reading import ArrayBatches, ProcessRows, ReadingEngine, say_whole
from keras_flow.backends.reading_tf_data import TfDataBatches

_ADAPTERS = "keras.src.trainers.data_adapters"

#: module and class of Keras's adapters of data of which a part cannot be asked for -> what and why
_WHOLE = {
    ("generator_data_adapter", "GeneratorDataAdapter"): ("the generator", "it yields batches as they are"),
    ("grain_dataset_adapter", "GrainDatasetAdapter"): ("the grain dataset", "its pipeline makes whole batches"),
}
_BY_ROWS = (
    ("array_data_adapter", "ArrayDataAdapter"),
    ("py_dataset_adapter", "PyDatasetAdapter"),
    ("torch_data_loader_adapter", "TorchDataLoaderAdapter"),
    ("tf_dataset_adapter", "TFDatasetAdapter"),
)


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
    if kind == "PyDatasetAdapter" and isinstance(adapter.py_dataset, reading_py_datasets.OwnRowsPyDataset):
        return reading_py_datasets.PyDatasetBatches(adapter, part, engine)
    if kind == "TFDatasetAdapter":
        return TfDataBatches(adapter._dataset, part, engine)
    if kind == "TorchDataLoaderAdapter":
        # asked for in each epoch: workers may stay, and are told once that a dataset draws
        if getattr(adapter, "_keras_flow_batches", None) is None:
            adapter._keras_flow_batches = reading_loaders.batches(adapter._dataloader, part, engine)
        own = adapter._keras_flow_batches
        return original(adapter) if own is reading_loaders.WHOLE else own
    whole = _WHOLE.get((type(adapter).__module__.rpartition(".")[2], kind))
    if whole is not None:
        source, why = whole
        say_whole(
            source, f"{why} (a PyDataset with a method rows, a DataLoader, and arrays are read by own rows)", part.word
        )
    return original(adapter)


def hooks(
    method: str, replacement: Callable[..., object], condition: Callable[..., ProcessRows | None]
) -> tuple[Hook, ...]:
    """The hooks on Keras's adapters.

    Args:
        method: of an adapter, which gives its batches to the engine.
        replacement: called as `replacement(part, original, adapter)`.
        condition: the part of batches that this process reads.
    """
    return (
        *(
            Hook(
                f"{_ADAPTERS}.{module}",
                f"{name}.{method}",
                replacement,
                "a process reads its own rows of a batch; Keras reads the whole batch in every process",
                when=condition,
            )
            for module, name in (*_BY_ROWS, *_WHOLE)
        ),
        Hook(
            f"{_ADAPTERS}.py_dataset_adapter",
            "PyDatasetAdapter.__init__",
            reading_py_datasets.adapter,
            "workers read the rows of this process, where the dataset can read a part of a batch",
            when=condition,
        ),
    )
