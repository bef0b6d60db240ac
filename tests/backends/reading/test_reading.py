"""The rows that processes read, put together, are the logical batches of one device; on any engine."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter

from keras_flow.backends.reading import loaders, process_rows, py_datasets, sources, tf_data
from keras_flow.backends.reading.batch_watch import PartOfRows
from keras_flow.backends.reading.process_rows import ArrayBatches, ProcessRows, ReadingEngine, one_ahead
from keras_flow.errors import FlowError, FlowWarning

ROWS, BATCH, PROCESSES = 45, 8, 4
X = np.random.default_rng(0).standard_normal((ROWS, 3)).astype("float32")
ENGINE = ReadingEngine("numpy", lambda array, sliced: array.convert_to_numpy(sliced), np.asarray)
UNEVEN = ("balanced", "padded", "whole")
PART = ProcessRows(PROCESSES, 1, 1, "balanced")


def parts(uneven: str) -> list[ProcessRows]:
    return [ProcessRows(PROCESSES, index, index, uneven) for index in range(PROCESSES)]  # type: ignore[arg-type]


def check(make: Callable[[ProcessRows], Iterable], wanted: list[np.ndarray], uneven: str, whole: int = 0) -> None:
    """What all processes read is the batches; `whole` of them are read whole at first."""
    read = [list(make(part)) for part in parts(uneven)]
    assert all(len(batches) == len(wanted) for batches in read)
    for number, (batch, *of_processes) in enumerate(zip(wanted, *read, strict=True)):
        leaves = [keras.tree.flatten(found)[0] for found in of_processes]
        if len(batch) < PROCESSES or number < whole or (uneven == "whole" and len(batch) % PROCESSES):
            assert all(np.array_equal(leaf, batch) for leaf in leaves)
            continue
        assert all(isinstance(leaf, PartOfRows) and leaf.shape == batch.shape for leaf in leaves), number
        covered = np.zeros(len(batch), int)
        for leaf in leaves:
            rows = slice(leaf.start, leaf.start + len(leaf.own))
            assert np.array_equal(leaf.own, batch[rows])
            assert len(leaf.own) <= -(-len(batch) // PROCESSES)
            covered[rows] += 1
            # as many rows more of those that are compared, whatever the number of processes
            assert (leaf.compared is not None) == (number < 3)
            if leaf.compared is not None:
                assert np.array_equal(leaf.compared, batch[leaf.compared_start :][: len(leaf.compared)])
                assert 0 < len(leaf.compared) <= -(-len(batch) // PROCESSES)
        assert covered.min() == 1


def batches_of(values: np.ndarray) -> list[np.ndarray]:
    return [values[start : start + BATCH] for start in range(0, len(values), BATCH)]


@pytest.mark.parametrize("uneven", UNEVEN)
def test_arrays_and_memory_maps(uneven: str, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=X.shape)
    mapped[:] = X
    for array, shuffle in ((X, False), (X, True), (mapped, False)):

        def adapter(array: np.ndarray = array, shuffle: bool = shuffle) -> Any:
            keras.utils.set_random_seed(3)
            return array_data_adapter.ArrayDataAdapter(array, batch_size=BATCH, shuffle=shuffle)

        def original(numbers: Any) -> Any:
            return numbers.get_numpy_iterator()

        wanted = list(original(adapter()))
        check(lambda part, adapter=adapter: ArrayBatches(adapter(), original, part, ENGINE), wanted, uneven)


@pytest.mark.filterwarnings("ignore::keras_flow.errors.FlowWarning")
@pytest.mark.parametrize("uneven", UNEVEN)
def test_pipelines_of_tf_data(uneven: str) -> None:
    import tensorflow as tf

    def double(x: Any) -> Any:
        return x * 2

    def normalised(batch: Any) -> Any:
        return batch - tf.reduce_mean(batch, 0)

    samples = tf.data.Dataset.from_tensor_slices(X).shuffle(ROWS, seed=4, reshuffle_each_iteration=False)
    apart = samples.map(double).map(tf.sin, num_parallel_calls=2).batch(BATCH).prefetch(2)
    wanted = [batch.numpy() for batch in apart]
    check(lambda part: tf_data.TfDataBatches(apart, part, ENGINE), wanted, uneven)
    # what mixes the rows of a batch, draws, or has no shape yet, makes whole batches
    sizes = tf.data.Dataset.range(1, 9).map(lambda n: tf.range(n)).map(lambda x: x[:1])
    for pipeline, why in (
        (apart.map(normalised), "MapDataset"),
        (samples.map(lambda x: x + tf.random.uniform([])).batch(BATCH), ""),
        (tf.data.Dataset.range(9).map(lambda n: tf.range(n)).padded_batch(3), "PaddedBatchDataset"),
        (sizes.map(lambda x: x + tf.random.uniform([], maxval=9, dtype=tf.int64)).batch(4), "no fixed shape"),
        (samples.map(tf.sparse.from_dense).batch(4), "sparse or ragged"),
        (samples.map(lambda x: tf.RaggedTensor.from_row_lengths(x, [1, 2])).map(tf.shape).batch(4), "sparse or ragged"),
    ):
        found = tf_data.TfDataBatches(pipeline, parts(uneven)[1], ENGINE)
        assert why in found.why_whole
        assert not found.functions


def test_functions_of_samples_are_those_that_the_program_made() -> None:
    """They keep the Python values with which they were made; one device traces them once."""
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices({"b": X, "a": X[:, 0]})
    for number in (1, 2):
        samples = samples.map(lambda row: {"b": row["b"] * number - row["a"][None], "a": row["a"]})  # noqa: B023
    apart = samples.map(lambda row: row["b"]).batch(BATCH)
    check(lambda part: tf_data.TfDataBatches(apart, part, ENGINE), [batch.numpy() for batch in apart], "balanced")


def test_a_tuple_of_one_stays_a_tuple() -> None:
    """Keras takes it for inputs alone, and a pair inside it for two inputs."""
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices(((X, X[:, 0]),))
    for apart in (samples.batch(BATCH), samples.map(lambda pair: (pair,)).batch(BATCH)):
        for (pair,) in tf_data.TfDataBatches(apart, parts("balanced")[1], ENGINE):
            assert [leaf.ndim for leaf in pair] == [2, 1]


def test_samples_that_draw_are_made_for_all_rows() -> None:
    """Every sample moves a random generator on: a process draws for all, and keeps its own."""
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices(X)

    def batches() -> Any:
        tf.random.set_seed(7)
        return samples.map(lambda x: x + tf.random.uniform([])).batch(BATCH)

    wanted = [batch.numpy() for batch in batches()]
    check(lambda part: tf_data.TfDataBatches(batches(), part, ENGINE), wanted, "balanced")


@pytest.mark.parametrize("uneven", UNEVEN)
def test_py_datasets(uneven: str) -> None:
    class Batches(keras.utils.PyDataset):
        num_batches = -(-ROWS // BATCH)

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("a whole batch was read")

        def rows(self, index: int, part: Any) -> Any:
            batch = X[BATCH * index : BATCH * index + BATCH]
            return (batch[part(len(batch))],)

    def batches(part: ProcessRows) -> Any:
        dataset = py_datasets.OwnRowsPyDataset(Batches(), part)
        return py_datasets.PyDatasetBatches(py_dataset_adapter.PyDatasetAdapter(dataset), part, ENGINE)

    check(batches, batches_of(X), uneven)


def test_rows_of_another_meaning() -> None:
    """A dataset may have a method of that name which is nothing of keras_flow's."""

    class Counted(keras.utils.PyDataset):
        def rows(self) -> int:
            return ROWS

    class Listed(keras.utils.PyDataset):
        rows = (1, 2)

    class Read(keras.utils.PyDataset):
        def rows(self, index: int, part: Any, strict: bool = False) -> Any: ...

    assert [py_datasets._reads_parts(each()) for each in (Counted, Listed, Read)] == [False, False, True]


def test_class_weights_do_not_ask_for_whole_batches() -> None:
    import tensorflow as tf
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    labels = np.arange(ROWS) % 3
    pipeline = tf.data.Dataset.from_tensor_slices((X, labels)).map(lambda x, y: (x + 1, y)).batch(BATCH)
    weighed = TFDatasetAdapter(pipeline, {0: 0.5, 1: 2.0, 2: 1.0})._dataset
    wanted = [weight.numpy() for _, _, weight in weighed]
    check(lambda part: third_of(tf_data.TfDataBatches(weighed, part, ENGINE)), wanted, "balanced")


def third_of(batches: Iterable) -> Iterator:
    return (batch[2] for batch in batches)


@pytest.mark.parametrize("uneven", UNEVEN)
def test_loaders(uneven: str) -> None:
    import torch

    def batches(part: ProcessRows) -> Any:
        dataset = torch.utils.data.TensorDataset(torch.tensor(X))
        return loaders.batches(torch.utils.data.DataLoader(dataset, BATCH), part, ENGINE)

    # whole at first, until it is known whether samples draw
    check(batches, batches_of(X), uneven, whole=1)


def test_a_loader_that_iterates_in_a_way_of_its_own_is_read_whole() -> None:
    import torch

    class Scaled(torch.utils.data.DataLoader):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    with pytest.warns(FlowWarning, match="its class iterates in a way of its own"):
        assert loaders.batches(Scaled(torch.tensor(X), BATCH), PART, ENGINE) is loaders.WHOLE


class _Draws:
    """A dataset whose samples draw from a certain one on."""

    def __init__(self, first: int):
        self.first = first

    def __getitem__(self, index: int) -> Any:
        import torch

        return X[index] + (torch.rand(3).numpy() if index >= self.first else 0)

    def __len__(self) -> int:
        return ROWS


def test_samples_that_draw_now_and_then_are_refused() -> None:
    """Each rank's generator would have moved on by its own samples, and shuffle the next epoch in another order."""
    import torch

    # in the last batch
    found = loaders.batches(torch.utils.data.DataLoader(_Draws(41), BATCH), PART, ENGINE)
    with pytest.raises(FlowError, match="drew from a random generator in batch 5"):
        list(found)
    process_rows._said.clear()
    with pytest.warns(FlowWarning, match="random generator, which every sample moves on"):
        assert len(list(loaders.batches(torch.utils.data.DataLoader(_Draws(0), BATCH), PART, ENGINE))) == 6


class _Scales:
    """A transform that draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, row: np.ndarray) -> np.ndarray:
        return row * np.float32(_drawn(self.generator))


class _Augmented:
    """A dataset that keeps a generator, of which its transforms draw."""

    def __init__(self, generator: Any) -> None:
        self.transforms = [_Scales(generator)]

    def __getitem__(self, index: int) -> np.ndarray:
        return self.transforms[0](X[index])

    def __len__(self) -> int:
        return ROWS


_OF_MODULE = np.random.default_rng(2)


class _DrawsByName(_Augmented):
    def __getitem__(self, index: int) -> np.ndarray:
        return X[index] * np.float32(_OF_MODULE.uniform())


def _drawn(generator: Any) -> float:
    import torch

    if isinstance(generator, torch.Generator):
        return float(torch.rand([], generator=generator))
    if isinstance(generator, keras.random.SeedGenerator):
        return float(np.asarray(generator.next())[0] % 7)
    return generator.random() if hasattr(generator, "random") else generator.uniform()


@pytest.mark.filterwarnings("ignore::keras_flow.errors.FlowWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_may_keep_its_generator(workers: int) -> None:
    """Each process would draw for its own rows alone: the numbers of the first rows for all."""
    import torch

    data = torch.utils.data
    makes: list[Callable[[], Any]] = [
        lambda: _Augmented(np.random.default_rng(0)),
        lambda: _Augmented(np.random.RandomState(0)),
        lambda: _Augmented(random.Random(0)),
        lambda: _Augmented(torch.Generator().manual_seed(0)),
        lambda: data.Subset(_Augmented(np.random.default_rng(0)), range(ROWS)),
        lambda: _DrawsByName(None),
    ]
    _check_augmented(makes, workers)


@pytest.mark.filterwarnings("ignore::keras_flow.errors.FlowWarning")
@pytest.mark.usefixtures("four_ranks")
def test_a_dataset_may_keep_a_layer_that_draws() -> None:
    _check_augmented([lambda: _Augmented(keras.layers.Dropout(0.5, seed=0).seed_generator)], 0)


def _check_augmented(makes: list[Callable[[], Any]], workers: int) -> None:
    import torch

    data = torch.utils.data
    for make in makes:
        _OF_MODULE.bit_generator.state = np.random.default_rng(2).bit_generator.state
        wanted = list(data.DataLoader(make(), BATCH, num_workers=workers))
        for part in parts("balanced")[1:3]:
            _OF_MODULE.bit_generator.state = np.random.default_rng(2).bit_generator.state
            found = list(loaders.batches(data.DataLoader(make(), BATCH, num_workers=workers), part, ENGINE))
            assert all(np.array_equal(mine, stock) for mine, stock in zip(found, wanted, strict=True))


class _Together:
    """A dataset that gives the samples of a batch together, and none alone."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [*X[indices]]

    def __len__(self) -> int:
        return ROWS


def test_datasets_that_give_the_samples_of_a_batch_together() -> None:
    """torch's own ask for each by its index; of another it is not known, so that it makes whole batches."""
    import torch

    data = torch.utils.data
    of_rows = data.TensorDataset(torch.tensor(X))
    together: Any = _Together()
    check(
        lambda part: loaders.batches(data.DataLoader(data.Subset(of_rows, range(ROWS)), BATCH), part, ENGINE),
        batches_of(X),
        "balanced",
        whole=1,
    )
    for dataset in (together, data.Subset(together, range(ROWS)), data.StackDataset(together, of_rows)):
        with pytest.warns(FlowWarning, match="__getitems__ of _Together"):
            assert loaders.batches(data.DataLoader(dataset, BATCH), PART, ENGINE) is loaders.WHOLE
        process_rows._said.clear()


def test_what_a_worker_sees_is_the_users_dataset() -> None:
    """As `worker_init_fn` does, which opens files or makes generators for a worker."""
    import pickle

    watched = pickle.loads(pickle.dumps(loaders._WatchedDataset(_Counting())))
    assert watched.begins == 7
    watched.begins = 8
    assert watched.__getitems__([1, 2]) == ([9, 10], False) and len(watched) == 3
    with pytest.raises(AttributeError):
        _ = watched.ends


class _Counting:
    def __init__(self) -> None:
        self.begins = 7

    def __getitem__(self, index: int) -> int:
        return self.begins + index

    def __len__(self) -> int:
        return 3


def test_a_process_of_several_ranks_reads_all_between_them() -> None:
    part = ProcessRows(8, 2, 5, "padded")
    assert part.own(16) == slice(4, 12) and part.compared(0, 16) == slice(12, 16)
    # of 10 rows, blocks of 2: the last three are empty
    assert part.own(10) == slice(4, 10) and ProcessRows(8, 6, 7, "padded").own(10) == slice(9, 10)


def test_the_next_batch_is_read_while_one_is_used() -> None:
    begun = []

    def batches() -> Any:
        for number in range(4):
            begun.append(number)
            yield number

    ahead = one_ahead(batches())
    assert next(ahead) == 0
    assert list(ahead) == [1, 2, 3] and begun == [0, 1, 2, 3]
    ahead = one_ahead(batches())
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]


def test_the_garbage_collector_waits_for_no_reading() -> None:
    # it runs in any thread: in one that begins, which holds the lock that the reading thread needs to end
    goes_on = threading.Event()

    def batches() -> Any:
        yield 0
        goes_on.wait(60)
        yield 1

    ahead = one_ahead(batches())
    assert next(ahead) == 0
    cycle: list[Any] = [ahead]
    cycle.append(cycle)
    del ahead, cycle
    collects = threading.Thread(target=gc.collect)
    collects.start()
    collects.join(20)
    waits = collects.is_alive()
    goes_on.set()
    assert not waits


def test_a_loop_lets_its_data_go() -> None:
    """At once: a cycle of references would keep the arrays of each loop until the garbage collector comes."""
    reader = sources.AdapterReader("get_numpy_iterator", lambda _: None, lambda *_: None, lambda whole, it: whole(it))
    gc.disable()
    try:
        adapter = reader.made(None, array_data_adapter.ArrayDataAdapter, X, batch_size=BATCH)
        assert len(list(adapter.get_numpy_iterator())) == -(-ROWS // BATCH)
        left = weakref.ref(adapter)
        del adapter
        assert left() is None
    finally:
        gc.enable()
