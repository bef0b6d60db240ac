"""Dtypes of global tensors: names as Keras writes them, and the defaults that are the same on every engine."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import DTypeLike

from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name; `"bfloat16"`, which numpy lacks, is that of `ml_dtypes`."""
    if name == "bfloat16":
        import ml_dtypes  # comes with the engines, not with numpy

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def standard_name(dtype: DTypeLike) -> str:
    """The name of a dtype, given as `keras.ops` takes it: a name, a type, or numpy's or the engine's own.

    Raises:
        FlowError: it is none of these.
    """
    try:
        name = keras.backend.standardize_dtype(dtype)
        numpy_dtype(name)
    except (TypeError, ValueError) as error:
        raise FlowError(f"{dtype!r} is no dtype of numbers; 'float32', 'int32' and 'bool' are, for example") from error
    return name


def default_of_values(array: np.ndarray) -> str:
    """The dtype of Python numbers: `keras.config.floatx()`, `"int32"` or `"bool"`."""
    if array.dtype.kind == "f":
        return keras.config.floatx()
    return "int32" if array.dtype.kind in "iu" else array.dtype.name


def default_of_array(array: np.ndarray | np.generic) -> str:
    """The dtype that an array's global tensor has when the caller names none: its own, except for 64 bits.

    Numpy makes 64 bits of every Python number, while engines compute in 32 unless told otherwise.
    """
    return array.dtype.name if array.dtype.itemsize < 8 else default_of_values(np.asarray(array))


def is_float(dtype: str) -> bool:
    """Whether numbers of this dtype are floating-point ones, so that tensors of it have gradients.

    Asked by name, since NumPy's `kind` of bfloat16 is none of a float.
    """
    return dtype.startswith(("float", "bfloat"))


def check_dtype(value: Any, wanted: str) -> None:
    """Check that the engine kept the dtype of a shard.

    Raises:
        FlowError: it made another one of it, as JAX does of 64 bits.
    """
    found = keras.backend.standardize_dtype(value.dtype)
    if found != wanted:
        raise FlowError(
            f"the {tensor_engine().name} backend made {found} of {wanted}; ask for dtype={found!r}, or let the engine "
            "have 64 bits (JAX: jax.config.update('jax_enable_x64', True))"
        )
