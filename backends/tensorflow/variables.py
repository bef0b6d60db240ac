"""Variables on TensorFlow: created as DTensor variables, assigned and read shard by shard."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.ops import resource_variable_ops

from keras_flow.backends.files import shared_files
from keras_flow.backends.hooking import distribution_of_new, hook
from keras_flow.backends.mail import stage_messages
from keras_flow.backends.rendezvous import meeting
from keras_flow.backends.tensorflow import creation, processes, tables
from keras_flow.backends.tensorflow.devices import host_device, rank_devices, world
from keras_flow.backends.tensorflow.layouts import gathered, in_step, layout_on, on_mesh, relayout, view_of
from keras_flow.backends.tensorflow.mesh_values import from_logical, index_of, is_dtensor, is_known, on_host, pack
from keras_flow.backends.tensorflow.mesh_variables import (
    AbsentVariable,
    MeshVariable,
    StageVariable,
    is_watched,
    updating,
)
from keras_flow.backends.tensorflow.mirrored import strategy
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import in_stateless_scope
from keras_flow.current.variable_layout import KerasLayout, is_elsewhere, keras_layout, stage_rank
from keras_flow.layout import Layout

# ---- creation


@hook(
    "keras.Variable",
    "_initialize_with_initializer",
    "makes a DTensor variable from shards; Keras makes a whole tf.Variable on one device",
    when=distribution_of_new,
)
def initialize_with_initializer(
    distribution: Distribution, original: Callable[..., object], variable: keras.Variable, initializer: Callable
) -> object:
    """Hook on `Variable._initialize_with_initializer`: make each rank's shard, with the values of one device."""
    placed = _layout_for(variable, distribution)
    if is_elsewhere(placed, world().local_ranks):
        _set_absent(variable, placed)
        return None
    if tables.is_table(placed):
        tables.make(variable, creation.block_of(initializer, tuple(variable._shape), variable._dtype), placed)
        return None
    # MirroredStrategy and one rank have variables of TensorFlow's own
    if not strategy.works_by_dtensor(placed.distribution):
        return _create_off_mesh(original, variable, initializer, placed)
    layout = layout_on(placed.layout, view_of(placed.distribution))
    shape, dtype = tuple(variable._shape), variable._dtype
    block = creation.block_of(initializer, shape, dtype, is_split=not layout.is_fully_replicated())
    indices = [index_of(shape, layout, where) for where in layout.mesh.local_device_locations()]
    # ranks that hold the same block share it
    blocks = {text: block(index) for text, index in {str(index): index for index in indices}.items()}
    _set_value(variable, pack([blocks[str(index)] for index in indices], layout, dtype), placed)
    return None


@hook(
    "keras.Variable",
    "_initialize",
    "makes a DTensor variable of a given value; Keras makes a whole tf.Variable on one device",
    when=distribution_of_new,
)
def initialize(
    distribution: Distribution, original: Callable[..., object], variable: keras.Variable, value: tf.Tensor | np.ndarray
) -> object:
    """Hook on `Variable._initialize`: a variable from a value."""
    # an initialiser, a variable of TensorFlow's own, or a tensor of a graph: Keras's own path
    if callable(value) or isinstance(value, tf.Variable) or not is_known(value):
        return original(variable, value)
    if variable._shape is None:
        # Keras sets it later, the layout needs it now
        variable._shape = tuple(int(length) for length in cast("tuple[int, ...]", value.shape))
    placed = _layout_for(variable, distribution)
    if is_elsewhere(placed, world().local_ranks):
        _set_absent(variable, placed)
        return None
    if tables.is_table(placed):
        tables.make(variable, on_host(value).__getitem__, placed)
        return None
    if not strategy.works_by_dtensor(placed.distribution):
        return _create_off_mesh(original, variable, value, placed)
    layout = layout_on(placed.layout, view_of(placed.distribution))
    _set_value(variable, from_logical(on_host(value), layout, variable._dtype), placed)
    return None


def _layout_for(variable: keras.Variable, distribution: Distribution) -> KerasLayout:
    # an optimizer gives its slots the layouts of its variables, which another distribution may have laid
    return keras_layout(variable) or distribution.get_variable_layout(variable)


def _create_off_mesh(
    original: Callable[..., object], variable: keras.Variable, value: object, placed: KerasLayout
) -> object:
    result = strategy.create(original, variable, value, placed)
    _share_reads(variable)
    return result


def _share_reads(variable: keras.Variable) -> None:
    """Let the process that has a stage's variable send it when it is read: elsewhere it is an `AbsentVariable`."""
    value = variable._value
    if type(value) is resource_variable_ops.ResourceVariable and _is_of_one_process(variable):
        value.__class__ = StageVariable  # Keras has made it; TensorFlow's own creators take no class
        value.holder = weakref.ref(variable)


def _set_absent(variable: keras.Variable, placed: KerasLayout) -> None:
    old = getattr(variable, "_value", None)
    with tf.init_scope(), tf.device(host_device()):
        absent = AbsentVariable(
            trainable=is_watched(variable), dtype=variable._dtype, shape=tuple(variable._shape), name=variable.name
        )
    if old is not None:  # optimizers find their slots by this id
        absent._unique_id = old._unique_id
    absent.holder = weakref.ref(variable)
    variable._value, variable._layout = absent, placed


def _set_value(variable: keras.Variable, value: tf.Tensor, placed: KerasLayout) -> None:
    # a new TensorFlow variable for a new layout: DTensor's variables keep theirs for life
    old = getattr(variable, "_value", None)
    with tf.init_scope():
        variable._value = MeshVariable(value, dtype=variable._dtype, trainable=is_watched(variable), name=variable.name)
    if old is not None:  # optimizers find their slots by this id
        variable._value._unique_id = old._unique_id
    variable._value.holder = weakref.ref(variable)
    variable._layout = placed


# ---- assignment and reading


def assigned_on_host(variable: keras.Variable, *args: object, **kwargs: object) -> dtensor.DVariable | None:
    """Condition of the hook on `Variable.assign`: the DTensor variable that is assigned to eagerly."""
    target = getattr(variable, "_value", None)
    is_eager = tf.executing_eagerly() and not in_stateless_scope()
    return target if isinstance(target, dtensor.DVariable) and is_eager else None


@hook(
    "keras.Variable",
    "assign",
    "load_weights, set_weights and callbacks give numpy, which a DTensor variable refuses (Unimplemented)",
    when=assigned_on_host,
)
def assign(
    target: dtensor.DVariable, original: Callable[..., object], variable: keras.Variable, value: object
) -> object:
    """Hook on `Variable.assign`: cut host values on the host, so that no device gets all of a split variable."""
    if isinstance(value, keras.Variable):
        value = value._value
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if is_dtensor(value) and dtensor.fetch_layout(value).mesh == target.layout.mesh:
        # a DTensor of this mesh never leaves its devices
        if tuple(value.shape) != tuple(variable._shape):
            return original(variable, value)  # Keras's own error
        with on_mesh(target.layout.mesh):
            value = tf.cast(value, target.dtype)
            if dtensor.fetch_layout(value) != target.layout:
                value = dtensor.relayout(value, target.layout)
    else:
        array = on_host(value)
        if tuple(array.shape) != tuple(variable._shape):
            return original(variable, value)
        value = from_logical(array, target.layout, target.dtype)
    target.assign(value)
    return value


def layout_of_use(variable: keras.Variable, *args: object, **kwargs: object) -> dtensor.Layout | None:
    """Condition of the hook on variables in a step: the layout in which one is read, where that is not its own.

    An optimizer computes in the variables' own layouts.
    """
    placed = keras_layout(variable)
    value = getattr(variable, "_value", None)
    if placed is None or not isinstance(value, dtensor.DVariable) or not in_step() or updating.get():
        return None
    return gathered(value.layout, placed)  # pyright: ignore[reportOptionalMemberAccess]


@hook(
    "keras.Variable",
    "__tf_tensor__",
    "a weight split over an axis of the batch is gathered where it is used; DTensor fails on some uses",
    when=layout_of_use,
)
def to_tensor(
    whole: dtensor.Layout, original: Callable[..., tf.Tensor], variable: keras.Variable, *args: object, **kwargs: object
) -> tf.Tensor:
    """Hook on `Variable.__tf_tensor__`: the value, gathered for its use.

    The gradient passes unchanged (`Optimizer.apply` gives it the variable's layout): an embedding's slices stay slices.
    """
    return relayout(original(variable, *args, **kwargs), whole, lambda upstream: upstream)


def read_directly(x: object, *args: object, **kwargs: object) -> MeshVariable | None:
    """Condition of the hook on `convert_to_tensor`: a variable on a mesh, outside of steps."""
    return x if isinstance(x, MeshVariable) and x.is_read_directly() else None


@hook(
    "keras:core",
    "convert_to_tensor",
    "variables are left to TensorFlow's compiled code, which reads DTensors where plain tensors are meant",
    when=read_directly,
)
def convert(
    variable: MeshVariable, original: Callable[..., object], x: object, *args: object, **kwargs: object
) -> object:
    """Hook on `convert_to_tensor`: the plain value. Keras leaves variables to TensorFlow, which would read DTensors."""
    return original(variable.value(), *args, **kwargs)


def to_host(value: tf.Tensor | keras.Variable) -> np.ndarray:
    """The logical value of an eager DTensor or variable, in host memory; of a stage's variable it is a collective."""
    if isinstance(value, keras.Variable):
        rank = stage_rank(value)
        if rank is not None and _is_of_one_process(value):
            here = None if isinstance(value._value, AbsentVariable) else value._value.read_value()
            return np.asarray(stage_messages.from_process_of(rank, here, False))
        value = value._value
    return on_host(value) if isinstance(value, tf.Tensor | tf.Variable) else value.numpy()


def value_on_mesh(value: object, *args: object, **kwargs: object) -> tf.Tensor | keras.Variable | None:
    """Condition of hooks on what reads values: an eager DTensor, or that of a variable.

    A variable itself where it is of a pipeline's stage, whose processes have the value.
    """
    if not tf.executing_eagerly():
        return None
    if isinstance(value, keras.Variable):
        if _is_of_one_process(value):
            return value
        return value._value if isinstance(value._value, dtensor.DVariable) else None
    return value if isinstance(value, tf.Tensor | tf.Variable) and is_dtensor(value) else None  # type: ignore[return-value]


@hook(
    "keras:core",
    "convert_to_numpy",
    "the numpy value of a split DTensor raises, in ops.convert_to_numpy",
    when=value_on_mesh,
)
def to_numpy(value: tf.Tensor, original: Callable[..., object], *args: object, **kwargs: object) -> np.ndarray:
    """Hook on `convert_to_numpy`: the logical value of what is on a mesh."""
    _meet_to_read(value)
    return to_host(value)


def _meet_to_read(value: Any) -> None:
    if isinstance(value, keras.Variable):
        needs_others = True
    else:
        several = processes.joined().count > 1 and is_dtensor(value)
        needs_others = several and not dtensor.fetch_layout(value).is_fully_replicated()
    if needs_others:
        meeting.meet(meeting.READS)


@hook("keras.Variable", "__array__", "the numpy value of a split DTensor raises", when=value_on_mesh)
def to_array(
    value: tf.Tensor,
    original: Callable[..., object],
    variable: keras.Variable,
    dtype: np.dtype | str | None = None,
    copy: bool | None = None,
) -> np.ndarray:
    """Hook on `Variable.__array__`: the logical value of what is on a mesh.

    Always in a new array, so that `copy` (numpy 2 asks for it) changes nothing.
    """
    _meet_to_read(value)
    return np.asarray(to_host(value), dtype=dtype)


def copy_while_writing(value: object, *args: object, **kwargs: object) -> np.ndarray | None:
    """Condition of hooks on what reads values: a copy made before this process began to write alone."""
    return shared_files.copy_of(value) if isinstance(value, keras.Variable) else None


@hook(
    "keras.Variable",
    "__array__",
    "while process 0 writes files alone, what is in several processes was read before",
    when=copy_while_writing,
)
@hook(
    "keras:core",
    "convert_to_numpy",
    "while process 0 writes files alone, what is in several processes was read before",
    when=copy_while_writing,
)
def copied(copy: np.ndarray, original: Callable[..., object], /, *args: object, **kwargs: object) -> np.ndarray:
    """Hook on `convert_to_numpy` and `Variable.__array__`: to read the variable would be a collective."""
    return copy


# ---- what the interface asks


def _is_of_one_process(variable: keras.Variable) -> bool:
    """Whether a variable is of a pipeline's stage, of which the others have nothing."""
    return processes.joined().count > 1 and stage_rank(variable) is not None


def is_split_over_processes(variable: keras.Variable) -> bool:
    """Whether the ranks of this process hold a part of a variable only."""
    value = variable._value
    if processes.joined().count == 1:
        return False
    if _is_of_one_process(variable):
        return True
    if strategy.is_mirrored_variable(value):
        # a copy that is summed when it is read; the others are equal in all processes
        return value.synchronization == tf.VariableSynchronization.ON_READ
    return is_dtensor(value) and not dtensor.fetch_layout(value).is_fully_replicated()


def place(variable: keras.Variable, layout: KerasLayout) -> None:
    """Move an existing variable to another layout, keeping its value."""
    if variable._value is None:  # made by a symbolic build that has not ended
        variable._layout = layout
        return
    if type(variable._value) is resource_variable_ops.UninitializedVariable:
        # a SavedModel's: its functions read this one, which stays whole where it is
        whole = Layout(layout.layout.placement, {}, layout.layout.shape)
        variable._layout = KerasLayout(replace(layout.given, layout=whole), layout.distribution)
        return
    # to a strategy, or away from one
    if strategy.is_mirrored(layout.distribution) or strategy.is_mirrored_variable(variable._value):
        strategy.place(variable, to_host(variable._value), layout)
        if strategy.is_mirrored(layout.distribution):
            return
    if is_elsewhere(layout, world().local_ranks):
        if _is_of_one_process(variable):
            to_host(variable)  # the process that will have it asks
        _set_absent(variable, layout)
        return
    if tables.is_table(layout):
        tables.make(variable, to_host(variable).__getitem__, layout)
        return
    if layout.distribution.has_one_rank:
        with tf.device(rank_devices()[layout.distribution.placement.ranks[0]]):
            strategy.place(variable, to_host(variable), layout)
        variable._layout = layout
        _share_reads(variable)
        return
    target = layout_on(layout.layout, view_of(layout.distribution))
    old = variable._value
    # the same shards on the same devices: only the distribution is another
    if isinstance(old, dtensor.DVariable) and old.layout == target:
        variable._layout = layout
        return
    _set_value(variable, from_logical(to_host(old), target, variable._dtype), layout)


def fill(variable: keras.Variable, part: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable[[], object]:
    """Read the part of a value that each rank of this process has; return what gives it to the variable."""
    target = variable._value
    if isinstance(target, AbsentVariable):
        return lambda: None
    if isinstance(target, tables.ServedTable):
        return functools.partial(target.fill, part)  # one at a time: this process has no rank that holds any
    if not isinstance(target, dtensor.DVariable):
        return functools.partial(variable.assign, part(tuple(slice(0, length) for length in variable.shape)))
    where_is = functools.partial(index_of, tuple(variable.shape), target.layout)
    parts = [part(where_is(where)) for where in target.layout.mesh.local_device_locations()]
    return functools.partial(target.assign, pack(parts, target.layout, target.dtype))


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """rank -> the component on its device."""
    placed = keras_layout(variable)
    value = variable._value
    if isinstance(value, AbsentVariable):
        return {}
    if strategy.is_mirrored_variable(value):
        return strategy.shards(variable)
    if isinstance(value, tables.ServedTable):
        return value.shards()
    if placed is None or not isinstance(value, dtensor.DVariable):
        return {0 if placed is None else placed.distribution.placement.ranks[0]: to_host(value)}
    parts = dtensor.unpack(value.read_value())
    # `numpy()` would copy
    return {rank: np.asarray(part) for rank, part in zip(view_of(placed.distribution).ranks, parts, strict=True)}
