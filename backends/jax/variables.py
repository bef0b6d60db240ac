"""Variables on JAX: created sharded, assigned and read without a full value on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from keras_flow.backends.files import shared_files, weights_files
from keras_flow.backends.hooking import distribution_of_new, hook, layout_over_ranks
from keras_flow.backends.jax import creation
from keras_flow.backends.jax.devices import rank_devices, world
from keras_flow.backends.jax.layouts import engine_layout
from keras_flow.backends.mail import stage_messages
from keras_flow.backends.rendezvous import meeting
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.keras_places import in_stateless_scope
from keras_flow.current.variable_layout import KerasLayout, is_elsewhere, keras_layout, stage_rank


@hook(
    "keras.Variable",
    "_initialize_with_initializer",
    "initializers that need the whole value would make it on every device",
    when=distribution_of_new,
)
def initialize_with_initializer(
    distribution: Distribution,
    original: Callable[..., None],
    variable: keras.Variable,
    initializer: Callable[..., object],
) -> None:
    """Hook on `JaxVariable._initialize_with_initializer`: constants and random values are made shard by shard.

    An initialiser that needs the whole value (Orthogonal, a user's own, any with `random="stock"`) makes it once, in
    host memory.
    """
    # Keras asks for a layout after the value is made; here the value depends on it
    if variable._layout is None:
        variable._layout = distribution.get_variable_layout(variable)
    layout = keras_layout(variable)
    if layout is None:
        return original(variable, initializer)
    sharding = engine_layout(layout.layout)
    value = creation.constant(initializer, variable._shape, variable._dtype, sharding)
    # every device holds the whole value anyway: Keras's own way
    if value is None and layout.layout.is_broadcast:
        return original(variable, initializer)
    if value is None:
        value = creation.drawn(initializer, variable._shape, variable._dtype, sharding)
    if value is not None:
        variable._value = value
        return None
    # else the whole value would be made on device 0, which may not have room for it
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        value = np.asarray(initializer(variable._shape, dtype=variable._dtype))
    variable._value = from_logical(value, sharding)
    return None


@hook("keras.Variable", "assign", "loaded values would pass whole through device 0", when=layout_over_ranks)
def assign(layout: KerasLayout, original: Callable[..., object], variable: keras.Variable, value: object) -> object:
    """Hook on `JaxVariable.assign`: a host value goes to the devices slice by slice."""
    # a traced value has its sharding from the step; only host values would pass through device 0
    if not isinstance(value, np.ndarray) or in_stateless_scope() or tuple(value.shape) != tuple(variable.shape):
        result = original(variable, np.array(value) if weights_files.is_mapped(value) else value)
        # a step that is given one of two variables deletes its array: those of EMA are assigned to the weights
        if (
            isinstance(value, keras.Variable)
            and isinstance(value._value, jax.Array)
            and value._value is variable._value
        ):
            variable._value = separate_copy(value._value, value._value.sharding)
        return result
    variable._value = from_logical(value, engine_layout(layout.layout), _numpy_dtype(variable))
    return variable._value


def laid_by_another(variable: keras.Variable, value: object) -> Distribution | None:
    """Condition of the hook on what a variable gives when it is read: the active distribution, if not the variable's.

    What a traced step reads is laid when it begins, and traced.
    """
    layout = keras_layout(variable)
    if layout is None or not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return None
    here = active()
    return here if here is not layout.distribution.whole else None


@hook(
    "keras.Variable",
    "_maybe_autocast",
    "what another distribution has laid would not meet what is laid here, in a loop of the program's own",
    when=laid_by_another,
)
def read_here(
    distribution: Distribution, original: Callable[..., object], variable: keras.Variable, value: Any
) -> object:
    """Hook on `Variable._maybe_autocast`, which a value passes when it is read: a copy in the active layout.

    A loop of the program's own may update a model of another distribution, or a metric: JAX refuses to compute with
    arrays of two meshes. The variable stays where it is laid, until `fit` or `dist.apply` lays the model anew.
    """
    layout = distribution.layout_for(variable.path, tuple(value.shape))
    return original(variable, jax.device_put(value, layout.backend_layout))


def host_value(tensor: object, *args: object, **kwargs: object) -> object | None:
    """Condition of hooks on what lays a tensor over devices: a value that each of several processes has whole."""
    if jax.process_count() == 1 or isinstance(tensor, Tracer):
        return None
    return True if not isinstance(tensor, jax.Array) or tensor.is_fully_addressable else None


@hook(
    "keras:engine.distribution",
    "distribute_tensor",
    "several processes: each new variable would be gathered from all of them, to be compared",
    when=host_value,
)
def distribute_tensor(
    _: object, original: Callable[..., object], tensor: object, layout: Sharding | KerasLayout
) -> object:
    """Hook on JAX's `distribute_tensor`: each process gives its devices their parts of a value that all have."""
    sharding = getattr(layout, "backend_layout", layout)
    if not isinstance(sharding, Sharding) or sharding.is_fully_addressable:
        return original(tensor, layout)
    return from_logical(np.asarray(tensor), sharding)


def lies_elsewhere(tensor: object, layout: object) -> Sharding | None:
    """Condition of the hook on what lays a tensor over devices: the sharding, where an array has another one.

    What devices of other processes get goes there by way of the host (`distribute_tensor`).
    """
    sharding: object = getattr(layout, "backend_layout", layout)
    if not isinstance(tensor, jax.Array) or isinstance(tensor, Tracer) or not isinstance(sharding, Sharding):
        return None
    if not sharding.is_fully_addressable:
        return None
    return None if tensor.sharding.is_equivalent_to(sharding, tensor.ndim) else sharding


@hook(
    "keras:engine.distribution",
    "distribute_tensor",
    "variables made of one array would share memory, and JAX ends the process where a step overwrites it twice",
    when=lies_elsewhere,
)
def lay_anew(sharding: Sharding, original: Callable[..., object], tensor: jax.Array, layout: object) -> jax.Array:
    """Hook on JAX's `distribute_tensor`: a new variable shares no memory with the array that it was made of."""
    return separate_copy(tensor, sharding)


def separate_copy(value: jax.Array, sharding: Sharding) -> jax.Array:
    """An array in a sharding which shares no memory with the given one.

    `jax.device_put` alone keeps the part that is on its device already: two variables that were given one array would
    share it, and a step, which overwrites its variables, would end the process (`docs/engine-bugs.md`).
    """
    pieces = [shard.data.copy() for shard in value.addressable_shards]
    own = jax.make_array_from_single_device_arrays(value.shape, value.sharding, pieces)
    return own if value.sharding == sharding else jax.device_put(own, sharding)


def place(variable: keras.Variable, layout: KerasLayout) -> None:
    """Move an existing variable to another layout, keeping its value."""
    before, variable._layout = keras_layout(variable), layout
    value = variable._value
    sharding: Any = layout.backend_layout
    if value is not None and jax.process_count() > 1 and (_is_of_stage(before) or _is_of_stage(layout)):
        variable._value = from_logical(_of_stage(value, before), sharding)
    elif isinstance(value, jax.Array) and sharding.is_fully_addressable and value.sharding != sharding:
        variable._value = separate_copy(value, sharding)
    elif isinstance(value, jax.Array) and value.is_fully_addressable and not sharding.is_fully_addressable:
        # what `jax.device_put` makes of a value of this process has no `addressable_shards` (jax 0.10)
        variable._value = from_logical(np.asarray(value), sharding)
    elif value is not None:
        variable._value = jax.device_put(value, sharding)


def fill(variable: keras.Variable, part: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable[[], object]:
    """Read the part of a value that each device has; return what gives it to the variable."""
    value = variable.value
    dtype = np.dtype(value.dtype)  # of 64 bits declared, JAX has 32

    def at(index: tuple[slice, ...] | None) -> np.ndarray:
        return part(index or ()).astype(dtype, copy=False)

    made = jax.make_array_from_callback(tuple(variable.shape), value.sharding, at, dtype=dtype)
    return functools.partial(setattr, variable, "_value", made)


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """rank -> the part of the variable that its device holds."""
    rank_of = _ranks(variable.value.sharding)
    return {rank_of[shard.device]: np.asarray(shard.data) for shard in variable.value.addressable_shards}


def is_split_over_processes(variable: keras.Variable) -> bool:
    """Whether the ranks of this process hold a part of a variable only."""
    if jax.process_count() > 1 and stage_rank(variable) is not None:
        return True
    value = variable._value
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)


def of_several_processes(*args: object, **kwargs: object) -> bool | None:
    """Condition of hooks on what reads values: the job has several processes."""
    return True if jax.process_count() > 1 else None


@hook(
    "keras.Variable",
    "__array__",
    "numpy(), get_weights and saving of variables of which other processes have parts: JAX raises",
    when=of_several_processes,
)
@hook(
    "keras:core",
    "convert_to_numpy",
    "tensors of which other processes have parts (predict_on_batch, ops.convert_to_numpy): JAX raises",
    when=of_several_processes,
)
def read_whole(_: object, original: Callable[..., np.ndarray], value: Any, *args: Any, **kwargs: Any) -> object:
    """Hook on `Variable.__array__` and `convert_to_numpy`: what other processes have is gathered, a collective."""
    if isinstance(value, keras.Variable):
        copy = shared_files.copy_of(value)
        if copy is not None:
            return np.asarray(copy, *args, **kwargs)
        if is_split_over_processes(value):
            meeting.meet(meeting.READS)
            layout = keras_layout(value)
            whole = _of_stage(value._value, layout) if _is_of_stage(layout) else gathered(value._value)
            return np.asarray(whole, *args, **kwargs)
    elif isinstance(value, jax.Array) and not isinstance(value, Tracer):
        if not (value.is_fully_addressable or value.is_fully_replicated):
            meeting.meet(meeting.READS)
        return original(gathered(value), *args, **kwargs)
    return original(value, *args, **kwargs)


def _is_of_stage(layout: KerasLayout | None) -> bool:
    """Whether a layout is that of a pipeline's stage, whose processes have the value."""
    return layout is not None and layout.distribution.stage_rank is not None


def _of_stage(value: jax.Array, layout: KerasLayout | None) -> np.ndarray:
    """The value of a variable that a pipeline's stage has, on all processes; of any other that of this one."""
    if layout is None or layout.distribution.stage_rank is None:
        return np.asarray(value)
    here = None if is_elsewhere(layout, world().local_ranks) else value
    return np.asarray(stage_messages.from_process_of(layout.distribution.stage_rank, here, False))


def gathered(value: jax.Array) -> jax.Array:
    """Return the array whole on every device. It is a collective where other processes have parts of it."""
    if value.is_fully_addressable or value.is_fully_replicated:
        return value
    return _replicate(value.sharding.mesh)(value)  # type: ignore[attr-defined]  # other shardings are of one process


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, PartitionSpec()))


def from_logical(value: np.ndarray, sharding: Sharding, dtype: np.dtype | None = None) -> jax.Array:
    """A sharded array from a host array, which may be in a file; each device gets its slice."""
    dtype = dtype or value.dtype

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return weights_files.read(value, index or ()).astype(dtype, copy=False)

    return jax.make_array_from_callback(value.shape, sharding, part, dtype=dtype)


def _ranks(sharding: Sharding) -> dict[jax.Device, int]:  # pyright: ignore[reportInvalidTypeForm]
    # a GPU host has CPUs too
    platform = next(iter(sharding.device_set)).platform
    return {device: rank for rank, device in enumerate(rank_devices(platform))}


def _numpy_dtype(variable: keras.Variable) -> np.dtype:
    return jax.numpy.dtype(variable._dtype)
