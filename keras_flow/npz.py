"""Arrays in an `.npz` file, those of number types that NumPy does not know by name included.

NumPy writes `bfloat16` and the 8-bit floats as raw bytes (`|V2`), with which it cannot compute when they are read.

>>> import io, ml_dtypes
>>> file = io.BytesIO()
>>> write(file, {"kernel": np.ones(2, ml_dtypes.bfloat16)})
>>> read(io.BytesIO(file.getvalue()))["kernel"].dtype.name
'bfloat16'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from keras_flow.checkpoint.manifest import numpy_dtype

#: the entry that has the dtypes of arrays whose bits were written as whole numbers, as JSON
_DTYPES = "dtypes of bits"


def write(file: Path | IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name; nothing is pickled."""
    dtypes = {name: array.dtype.name for name, array in arrays.items() if array.dtype.kind == "V"}
    plain = {name: array.view(f"u{array.itemsize}") if name in dtypes else array for name, array in arrays.items()}
    np.savez(file, allow_pickle=False, **{_DTYPES: np.array(json.dumps(dtypes))}, **plain)


def read(file: Path | IO[bytes]) -> dict[str, np.ndarray]:
    """Read the arrays that `write` wrote, by name, in their order."""
    with np.load(file) as found:
        dtypes = json.loads(str(found[_DTYPES]))
        arrays = {name: found[name] for name in found.files if name != _DTYPES}
    return {name: array.view(numpy_dtype(dtypes[name])) if name in dtypes else array for name, array in arrays.items()}
