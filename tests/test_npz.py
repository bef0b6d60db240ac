"""Arrays come back from an `.npz` file as they were, of number types that NumPy lacks too."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from keras_flow import npz


def test_arrays_of_any_dtype_come_back(tmp_path: Path) -> None:
    arrays = {
        "bfloat16": np.arange(6, dtype="float32").astype(ml_dtypes.bfloat16).reshape(2, 3).T,
        "float8": np.array(1.5, ml_dtypes.float8_e4m3fn),
        "float32": np.ones((0, 2), "float32"),
        "text": np.array("of a program"),
    }
    npz.write(tmp_path / "arrays.npz", arrays)
    found = npz.read(tmp_path / "arrays.npz")
    assert list(found) == list(arrays)
    for name, wanted in arrays.items():
        assert found[name].dtype == wanted.dtype
        assert np.array_equal(found[name], wanted)
