"""Variables on JAX: created sharded, assigned and read without a full value on one device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import keras
import numpy as np
from jax.sharding import Sharding
from keras import initializers
from keras.src.backend.common.stateless_scope import in_stateless_scope

from keras_flow.backends import weights_files
from keras_flow.backends.jax import creation
from keras_flow.backends.jax.layouts import engine_layout
from keras_flow.current.distribution import Distribution
from keras_flow.current.variable_layout import KerasLayout, keras_layout


def should_shard_at_init(_: object, original: Callable[..., bool], layout: Sharding, shape: tuple[int, ...]) -> bool:
    """Hook: Keras shards initialisers of very large variables only; below that the full value is made on device 0."""
    return not layout.is_fully_replicated


def initialize(
    distribution: Distribution,
    original: Callable[..., None],
    variable: keras.Variable,
    initializer: Callable[..., object],
) -> None:
    """Hook: constants are made shard by shard, random values too; an initialiser that needs the whole value
    (Orthogonal, a user's own) makes it once, in host memory."""
    if variable._layout is None:
        variable._layout = distribution.get_variable_layout(variable)
    layout = keras_layout(variable)
    if layout is None:
        return original(variable, initializer)
    sharding = engine_layout(layout.layout)
    constant = _constant_of(initializer)
    if constant is not None:
        part = np.full(sharding.shard_shape(variable._shape), constant, _numpy_dtype(variable))
        variable._value = jax.make_array_from_callback(variable._shape, sharding, lambda index: part, dtype=part.dtype)
        return None
    if layout.layout.is_broadcast:
        return original(variable, initializer)
    value = creation.drawn(initializer, variable._shape, variable._dtype, sharding)
    if value is not None:
        variable._value = value
        return None
    if isinstance(initializer, creation.DRAWN):
        return original(variable, initializer)
    with jax.default_device(jax.devices("cpu")[0]):
        value = np.asarray(initializer(variable._shape, dtype=variable._dtype))
    variable._value = from_host(value, sharding)
    return None


def _constant_of(initializer: Callable[..., object]) -> float | None:
    """The value of a constant initialiser, or None."""
    if type(initializer) is initializers.Zeros:
        return 0.0
    if type(initializer) is initializers.Ones:
        return 1.0
    if type(initializer) is initializers.Constant and isinstance(initializer.value, (int, float)):
        return float(initializer.value)
    return None


def assign(layout: KerasLayout, original: Callable[..., object], variable: keras.Variable, value: object) -> object:
    """Hook: a host value goes to the devices slice by slice; Keras would put it whole on device 0 first."""
    if not isinstance(value, np.ndarray) or in_stateless_scope() or tuple(value.shape) != tuple(variable.shape):
        return original(variable, np.array(value) if weights_files.is_mapped(value) else value)
    variable._value = from_host(value, engine_layout(layout.layout), _numpy_dtype(variable))
    return variable._value


def place(variable: keras.Variable, layout: KerasLayout) -> None:
    """Lay an existing variable anew, keeping its value."""
    variable._layout = layout
    if variable._value is not None:
        variable._value = jax.device_put(variable._value, layout.backend_layout)


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """rank -> the part of the variable that its device holds."""
    rank_of = _ranks(variable.value.sharding)
    return {rank_of[shard.device]: np.asarray(shard.data) for shard in variable.value.addressable_shards}


def from_host(value: np.ndarray, sharding: Sharding, dtype: np.dtype | None = None) -> jax.Array:
    """A sharded array from a host array, which may be in a file; each device gets its slice."""
    dtype = dtype or value.dtype

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return weights_files.read(value, index or ()).astype(dtype, copy=False)

    return jax.make_array_from_callback(value.shape, sharding, part, dtype=dtype)


def _ranks(sharding: Sharding) -> dict[jax.Device, int]:  # pyright: ignore[reportInvalidTypeForm]
    platform = next(iter(sharding.device_set)).platform
    return {device: rank for rank, device in enumerate(jax.devices(platform))}


def _numpy_dtype(variable: keras.Variable) -> np.dtype:
    return jax.numpy.dtype(variable._dtype)
