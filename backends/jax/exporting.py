"""Exporting on JAX: plain values of variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import keras
import numpy as np

if TYPE_CHECKING:
    import jax


def plain_value(variable: keras.Variable, value: np.ndarray, before: object = None) -> jax.Array:
    """An array on the default device; arrays do not change, so what was made before is of no use."""
    # Keras tells the type for all its engines together
    return cast("jax.Array", keras.ops.convert_to_tensor(value, dtype=variable.dtype))


def track(model: keras.Layer) -> None:
    """Nothing: JAX lists no variables."""
