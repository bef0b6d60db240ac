"""Checks of reading: each rank of data parallel reads the rows that it computes, in the order of one device."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import numpy as np

from tests.backends.torch.registry import check, error_of
from tests.backends.torch.rows import CLASSES, Numbers, off


@check
def ranks_read_their_own_rows_of_arrays() -> None:
    """In the order of Keras's shuffle; of the first batches as many rows more, to be compared among the ranks."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.reading import process_rows

    rows, batch, epochs = 47, 8, 2
    x, y = np.random.default_rng(0).standard_normal((rows, 6)).astype("float32"), np.arange(rows) % CLASSES

    def trained(mixes: bool) -> Numbers:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        hidden = keras.layers.Lambda(lambda x: x)(inputs) if mixes else inputs
        model = keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax")(hidden))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        weights = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}
        history = model.fit(
            x, y, batch_size=batch, epochs=epochs, class_weight=weights, validation_split=0.2, verbose=0
        )
        logs = {name: np.asarray(values) for name, values in history.history.items()}
        return {
            **logs,
            "predicted": model.predict(x, batch_size=batch, verbose=0),
            **dict(enumerate(model.get_weights())),
        }

    original = process_rows.ArrayBatches._read

    def counted(batches: process_rows.ArrayBatches, indices: np.ndarray) -> object:
        read.append(len(indices))
        return original(batches, indices)

    for mixes in (False, True):
        read: list[int] = []
        wanted = trained(mixes)
        with kf.DataParallel().scope(), mock.patch.object(process_rows.ArrayBatches, "_read", counted):
            assert not off(wanted, found := trained(mixes)), off(wanted, found)
        # 47 rows, 10 of them for validation: batches of 8 (the last of 5) are blocks of 2 (of 2 or 1)
        assert 2 in read and max(read) <= 2, read


@check
def ranks_fetch_their_own_samples_of_a_loader() -> None:
    """With workers too, and not where samples draw random numbers or a batch depends on all of its samples."""
    import keras
    import torch

    import keras_flow as kf

    rows, batch = 83, 8
    x, y = np.random.default_rng(0).standard_normal((rows, 6)).astype("float32"), np.arange(rows) % CLASSES

    class Samples(torch.utils.data.Dataset):
        def __init__(self, draws: bool) -> None:
            self.fetched, self.draws = 0, draws

        def __len__(self) -> int:
            return rows

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            self.fetched += 1
            return x[index] * np.float32(np.random.uniform(0.5, 1.5) if self.draws else 1.0), y[index]

    def trained(draws: bool = False, **options: Any) -> tuple[Numbers, int, int]:
        keras.utils.set_random_seed(0)
        samples = Samples(draws)
        generator = torch.Generator()
        generator.manual_seed(5)
        loader = torch.utils.data.DataLoader(samples, batch, shuffle=True, generator=generator, **options)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", kf.FlowWarning)
            history = model.fit(loader, epochs=2, verbose=0)
        logs = {name: np.asarray(values) for name, values in history.history.items()}
        told = [str(warning.message) for warning in said if "reads whole batches" in str(warning.message)]
        return {**logs, **dict(enumerate(model.get_weights()))}, samples.fetched, len(told)

    def padded(samples: list) -> Any:
        return torch.utils.data.default_collate(samples)

    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "workers": {"num_workers": 2, "persistent_workers": True},
        "drop_last": {"drop_last": True},
        "draws": {"draws": True},
        "collate_fn": {"collate_fn": padded},
    }
    for name, options in cases.items():
        wanted, all_fetched, _ = trained(**options)
        with kf.DataParallel().scope():
            found, fetched, told = trained(**options)
        assert not off(wanted, found), (name, off(wanted, found))
        whole = name in ("draws", "collate_fn")
        assert told == whole, (name, told)
        # the first batch is whole in each epoch, and of the last, 3 rows on 4 ranks, all are
        if name != "workers":
            assert fetched == all_fetched if whole else fetched < 0.45 * all_fetched, (name, fetched, all_fetched)

    sampler = torch.utils.data.DistributedSampler(Samples(False), 4, 0)
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        try:
            model.fit(torch.utils.data.DataLoader(Samples(False), batch, sampler=sampler), verbose=0)
        except kf.FlowError as error:
            assert "DistributedSampler" in str(error)
        else:
            raise AssertionError("a sampler for each rank was taken")


@check
def data_of_different_lengths_are_refused() -> None:
    """The rank with fewer batches would leave the others waiting."""
    import keras

    import keras_flow as kf

    class Batches(keras.utils.PyDataset):
        @property
        def num_batches(self) -> int:
            return 3 if kf.env.process_index() < 2 else 4

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            return np.ones((8, 6), "float32"), np.ones((8, 2), "float32")

    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        try:
            model.fit(Batches(), verbose=0)
        except kf.FlowError as error:
            assert "rank 0 has 3 batches, rank 2 has 4" in str(error), error
        else:
            raise AssertionError("data of two lengths were taken")


@check
def ranks_read_their_own_rows_of_a_py_dataset() -> None:
    """Where it has `rows`; in the order of one device, with class weights and Keras's workers."""
    import keras

    import keras_flow as kf

    class Batches(keras.utils.PyDataset):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.x = np.random.default_rng(0).standard_normal((45, 6)).astype("float32")
            self.y = np.arange(45) % CLASSES
            self.read: dict[int, set[int]] = {}

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return self.rows(index, slice)

        def rows(self, index: int, part: Any) -> Any:
            batch = slice(8 * index, 8 * index + 8)
            own = part(len(self.x[batch]))
            self.read.setdefault(index, set()).add(len(self.x[batch][own]))
            return self.x[batch][own], self.y[batch][own]

    def trained(**options: Any) -> Numbers:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        batches = Batches(**options)
        weights = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}
        history = model.fit(batches, epochs=2, class_weight=weights, verbose=0).history
        read.append(batches.read)
        return {
            "loss": np.asarray(history["loss"]),
            "predicted": model.predict(batches, verbose=0),
            **dict(enumerate(model.get_weights())),
        }

    read: list[dict[int, set[int]]] = []
    for options in ({}, {"workers": 2}):
        wanted = trained(**options)
        with kf.DataParallel().scope():
            assert not off(wanted, found := trained(**options)), off(wanted, found)
        # of 8 rows on 4 ranks 2 each, and of the last 5 on the ranks after the first 1; three times 2 are compared
        last = 2 if kf.env.process_index() == 0 else 1
        assert read.pop() == {**{index: {2} for index in range(5)}, 5: {last}}


@check
def parts_that_are_not_what_was_asked_for_are_refused() -> None:
    import keras

    import keras_flow as kf

    class Whole(keras.utils.PyDataset):
        num_batches = 5

        def __getitem__(self, index: int) -> Any:
            return np.ones((8, 6), "float32"), np.ones((8, 2), "float32")

        def rows(self, index: int, part: Any) -> Any:
            part(8)
            return self[index]

    class Deaf(Whole):
        def rows(self, index: int, part: Any) -> Any:
            return self[index]

    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        for data, text in ((Whole(), "shape [8, 6], where part(8) chooses 2 rows"), (Deaf(), "did not ask which rows")):
            error = error_of(lambda data=data: model.fit(data, shuffle=False, verbose=0))
            assert error.startswith("FlowError") and text in error, error


@check
def what_is_read_whole_is_said_once() -> None:
    import keras

    import keras_flow as kf
    from keras_flow.backends.reading import process_rows

    class Batches(keras.utils.PyDataset):
        num_batches = 2

        def __getitem__(self, index: int) -> Any:
            return np.ones((8, 6), "float32"), np.ones((8, 2), "float32")

    def generator() -> Any:
        while True:
            yield np.ones((8, 6), "float32"), np.ones((8, 2), "float32")

    process_rows._said.clear()
    with kf.DataParallel().scope(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        for _ in range(2):
            model.fit(Batches(), verbose=0)
            model.fit(generator(), steps_per_epoch=2, verbose=0)
    said = [str(warning.message) for warning in caught if "reads whole batches" in str(warning.message)]
    assert len(said) == 2 and "PyDataset Batches" in said[0] and "the generator" in said[1], said
