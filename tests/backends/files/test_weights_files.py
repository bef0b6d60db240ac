"""Large weights are read from files slice by slice, and values are those that were saved."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pytest

from keras_flow.backends.files import weights_files
from tests.backends.files import large_files
from tests.sampling import each_on_one


@pytest.mark.parametrize(("backend", "program"), each_on_one(("jax", "tensorflow", "torch"), [large_files.main]))
def test_loaded_under_a_layout(backend: str, program, on_ranks) -> None:
    found = on_ranks(backend)(program)
    assert found["weights"]
    assert found["model"]
    assert found["parts"] >= 2


class Store:
    """What Keras's store has of an open file."""

    def __init__(self, file: h5py.File):
        self._h5_entry_group = file


def whole(store: Store, key: str) -> np.ndarray:
    return np.array(store._h5_entry_group[key])


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((700, 30, 20)).astype("float32")


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None), slice(None)),
        (slice(3, 641), slice(10, 20), slice(None)),
        (slice(700, 700), slice(None), slice(0, 5)),
        (),
    ],
)
def test_slices_of_a_mapped_entry(values, index, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weights_files, "BLOCK", 100_000)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["0"] = values
    with h5py.File(tmp_path / "a.h5") as file:
        mapped = weights_files.entry(None, whole, Store(file), "0")
        assert weights_files.is_mapped(mapped)
        assert not weights_files.is_mapped(mapped[1:])
        assert np.array_equal(weights_files.read(mapped, index), values[index])


def test_other_entries_are_read_whole(values, tmp_path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["small"] = values[:3]
        file.create_dataset("packed", data=values, compression="gzip")
        file.create_dataset("tagged", data=values).attrs["dtype"] = "bfloat16"
        for name in file:
            found = weights_files.entry(None, whole, Store(file), name)
            assert type(found) is np.ndarray
            assert np.array_equal(found, file[name])
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["0"] = values
        assert type(weights_files.entry(None, whole, Store(file), "0")) is np.ndarray
