"""Variables on TensorFlow: created as DTensor variables, assigned and read shard by shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeGuard, TypeVar, cast, overload

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context, record
from tensorflow.python.ops import resource_variable_ops

from keras_flow.backends import meeting, messages, shared_files, weights_files
from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow import creation, mirrored_strategy, processes, tables
from keras_flow.backends.tensorflow.devices import host_device, rank_devices, world
from keras_flow.backends.tensorflow.layouts import gathered, in_step, layout_on, on_mesh, relayout, view_of
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import in_stateless_scope, in_symbolic_scope
from keras_flow.current.variable_layout import KerasLayout, is_elsewhere, keras_layout, stage_rank
from keras_flow.errors import FlowError

_Part = TypeVar("_Part")

#: an optimizer's update is running
updating: ContextVar[bool] = ContextVar("keras_flow_updating", default=False)
#: a layer is being called outside of a step
called_directly: ContextVar[bool] = ContextVar("keras_flow_called_directly", default=False)


class _OpaqueHandle:
    """A variable's handle, but of no type that TensorFlow's eager operations know.

    Operations that are called with a variable itself (`tf.maximum(x, kernel.value)`) read its `_handle` in C++, past
    `value`, and get a DTensor, which fits no other value. Without a handle they convert it, as they do any object.
    """

    def __init__(self, handle: tf.Tensor):
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class MeshVariable(dtensor.DVariable):
    """A variable on a mesh, whose value outside of steps is a plain, logical tensor on this process's first rank.

    So what is computed eagerly (a model's call, a gradient tape, control flow) is TensorFlow's own computation on one
    device: DTensor runs an eager operation without seeing the others, and fails on many. Tapes see the read as that of
    a `tf.Variable`; the gradient by the variable is a plain tensor too. `read_value` returns the DTensor everywhere.
    """

    @property
    def handle(self) -> tf.Tensor:
        """The resource, on the mesh."""
        return self.__dict__["_handle"]

    @property
    def _handle(self) -> object:  # read by TensorFlow 2.21 in pywrap_tfe_src.cc, CheckResourceVariable
        return _OpaqueHandle(self.handle)

    @_handle.setter
    def _handle(self, handle: tf.Tensor) -> None:
        self.__dict__["_handle"] = handle

    def value(self) -> tf.Tensor:
        """The value: a DTensor in a step and in an optimizer's update, otherwise a plain tensor."""
        if not self._is_read_directly():
            return super().value()
        # a graph inside a direct call (`tf.vectorized_map`) captures what is read eagerly; the tapes see both
        with context.eager_mode():
            resource_variable_ops.variable_accessed(self)
            with record.stop_recording(), tf.device(own_device(self.layout.mesh)):
                value = _join(self.read_value(), tf.identity, tf.concat)
            # as TensorFlow's private `record` is told of ReadVariableOp (resource_variable_ops, 2.21)
            record.record_operation(
                "ReadVariableOp", [value], [self.handle], lambda upstream: [upstream], lambda tangent: [tangent]
            )
            return value

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Rows of the value."""
        if not self._is_read_directly():
            return super().sparse_read(indices, name)
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Elements of the value."""
        if not self._is_read_directly():
            return super().gather_nd(indices, name)
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: object, *args: object, **kwargs: object) -> object:
        """Set the value: outside of steps any tensor, each rank's part of which is cut on the host."""
        return super().assign(self._laid(value), *args, **kwargs)

    def assign_add(self, delta: object, *args: object, **kwargs: object) -> object:
        """Add to the value; as `assign`."""
        return super().assign_add(self._laid(delta), *args, **kwargs)

    def assign_sub(self, delta: object, *args: object, **kwargs: object) -> object:
        """Subtract from the value; as `assign`."""
        return super().assign_sub(self._laid(delta), *args, **kwargs)

    def _laid(self, value: Any) -> object:
        if isinstance(value, dtensor.DVariable):
            value = value.read_value()
        if not self._is_read_directly():
            if not in_step() and not in_symbolic_scope() and _has_argument(value):
                what = f"variable {self.name!r} is assigned a value computed from an argument of the function; it is"
                raise FlowError(in_a_function(what))
            return value
        if is_dtensor(value):
            return value
        tensor = tf.convert_to_tensor(value, self.dtype)
        if not _is_known(tensor):
            raise FlowError(
                f"{self.name!r} is assigned in a graph within a direct call, as the function of ops.vectorized_map is "
                "one (a random number assigns its seed): outside of steps a variable on several ranks is assigned "
                "eagerly. Draw and assign outside of that function, use ops.map, or compute it by predict or fit"
            )
        return from_logical(_host(tensor), self.layout, self.dtype)

    def _is_read_directly(self) -> bool:
        if in_step() or (updating.get() and tf.executing_eagerly()):
            return False
        if tf.executing_eagerly() or called_directly.get():
            return True
        # Keras's inference of shapes computes nothing, and seeds may be read in the graph of an input pipeline
        if self.dtype.is_floating and not in_symbolic_scope() and not in_stateless_scope():
            raise FlowError(in_a_function(f"variable {self.name!r} is"))
        return False


def _has_argument(value: object) -> bool:
    """Whether a tensor is computed from an argument of the function that is traced: it is called with plain tensors."""
    if tf.executing_eagerly() or not tf.is_symbolic_tensor(value):
        return False
    captured = {id(inner) for inner in value.graph.internal_captures}
    left, seen = [value], set()
    while left:
        tensor = left.pop()
        if tensor.op.type == "Placeholder" and id(tensor) not in captured and tensor.shape.rank != 0:
            return True  # a scalar goes anywhere
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            left += tensor.op.inputs
    return False


class AbsentVariable(resource_variable_ops.UninitializedVariable):
    """What stands for a variable of a pipeline's stage that another process has: its shape, without memory.

    To read it is TensorFlow's error; what is assigned is for the process that has it.
    """

    def assign(self, *args: object, **kwargs: object) -> object:
        """Nothing."""
        return self

    assign_add = assign_sub = assign


def in_a_function(what: str) -> str:
    """The text of the error for what is computed in a `tf.function` of the user's own."""
    return (
        f"{what} on several ranks, in a tf.function of your own, which TensorFlow's DTensor cannot run: leave "
        "@tf.function out (the program then runs eagerly, on one device), or write it as `train_step`, `test_step` or "
        "`predict_step` of a model, which keras_flow compiles for all ranks"
    )


def own_device(mesh: dtensor.Mesh) -> str:
    """The device of this process's first rank on a mesh: what is called outside of steps is computed there."""
    return mesh.local_devices()[0]


# ---- DTensors and host values


def is_dtensor(value: object) -> TypeGuard[tf.Tensor]:
    """Whether an eager tensor or variable is on a mesh."""
    if isinstance(value, dtensor.DVariable):
        return True
    return isinstance(value, tf.Tensor) and hasattr(value, "_numpy_internal") and dtensor.is_dtensor(value)


def cut(value: np.ndarray, layout: dtensor.Layout) -> list[np.ndarray]:
    """The components of a host value, in the order of `dtensor.pack`; views, not copies."""
    locations = layout.mesh.local_device_locations()
    return [weights_files.read(value, _index(value.shape, layout, where)) for where in locations]


def _index(shape: Sequence[int], layout: dtensor.Layout, where: Mapping[str, int]) -> tuple[slice, ...]:
    """The elements of the component at a place of the mesh; all along every dim that no mesh axis splits."""
    index = [slice(0, length) for length in shape]
    for dim, spec in enumerate(layout.sharding_specs):
        # even blocks: resolve gives DTensor no split that does not divide
        if spec != dtensor.UNSHARDED:
            size = shape[dim] // layout.mesh.dim_size(spec)
            index[dim] = slice(where[spec] * size, (where[spec] + 1) * size)
    return tuple(index)


def pack(
    components: Sequence[tf.Tensor | np.ndarray], layout: dtensor.Layout, dtype: str | tf.DType | None = None
) -> tf.Tensor:
    """A DTensor from the components of all ranks; each is copied to its own device only.

    A list of components is emptied on the way, so that no component is in memory twice.
    """
    with tf.init_scope():
        tensors = []
        left = components if isinstance(components, list) else list(components)
        # outside of any graph, one component after the other: a copy of the whole is never on a device
        for device in layout.mesh.local_devices():
            with tf.device(device):
                tensors.append(tf.identity(tf.convert_to_tensor(left.pop(0), dtype)))
        assert not left, f"{len(left)} components too many"
        return dtensor.pack(tensors, layout)


def from_logical(value: object, layout: dtensor.Layout, dtype: str | tf.DType | None = None) -> tf.Tensor:
    """A DTensor from a host value, which may be in a file."""
    array = np.asanyarray(value)
    if dtype is not None:
        copy = not weights_files.is_mapped(array)  # parts of a mapped array are copies
        parts = [part.astype(tf.as_dtype(dtype).as_numpy_dtype, copy=copy) for part in cut(array, layout)]
    else:
        parts = cut(array, layout)
    return pack(parts, layout, dtype)


def to_host(value: tf.Tensor | keras.Variable) -> np.ndarray:
    """The logical value of an eager DTensor or variable, in host memory; of a stage's variable it is a collective."""
    if isinstance(value, keras.Variable):
        rank = stage_rank(value)
        if rank is not None and _is_of_one_process(value):
            here = None if isinstance(value._value, AbsentVariable) else value._value.read_value()
            return np.asarray(messages.from_process_of(rank, here, False))
        value = value._value
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if not is_dtensor(value):
        return value.numpy()
    return _join(value, lambda part: part.numpy(), np.concatenate)


@overload
def to_logical(value: tf.Tensor) -> tf.Tensor: ...
@overload
def to_logical(value: object) -> object: ...
def to_logical(value: object) -> object:
    """The logical value of an eager DTensor as a plain tensor; anything else as it is."""
    if not is_dtensor(value):
        return value
    with tf.device(host_device()):
        return _join(value, tf.identity, tf.concat)


def _join(value: tf.Tensor, read: Callable[[tf.Tensor], _Part], concat: Callable[..., _Part]) -> _Part:
    layout = dtensor.fetch_layout(value)
    # other processes may have parts of it: a collective then
    if processes.joined().count > 1 and not layout.is_fully_replicated():
        layout = dtensor.Layout.replicated(layout.mesh, layout.rank)
        value = dtensor.relayout(value, layout)
    parts = dtensor.unpack(value)
    where = layout.mesh.local_device_locations()
    # level by level: first the blocks along the first split dim, within each those along the next
    used = [(dim, spec) for dim, spec in enumerate(layout.sharding_specs) if spec != dtensor.UNSHARDED]

    def joined(level: int, fixed: dict[str, int]) -> _Part:
        if level == len(used):
            return read(
                next(p for p, at in zip(parts, where, strict=True) if all(at[k] == i for k, i in fixed.items()))
            )
        dim, spec = used[level]
        blocks = [joined(level + 1, {**fixed, spec: i}) for i in range(layout.mesh.dim_size(spec))]
        return concat(blocks, dim)

    return joined(0, {})


# ---- creation


@hook(
    "keras.Variable",
    "_initialize_with_initializer",
    "makes a DTensor variable from shards; Keras makes a whole tf.Variable on one device",
)
def initialize_with_initializer(
    distribution: Distribution, original: Callable[..., object], variable: keras.Variable, initializer: Callable
) -> object:
    """Hook on `Variable._initialize_with_initializer`: make the shards, each for its rank.

    Their values are those of one device.
    """
    placed = _layout_for(variable, distribution)
    if is_elsewhere(placed, world().local_ranks):
        _set_absent(variable, placed)
        return None
    if tables.is_table(placed):
        tables.make(variable, creation.block_of(initializer, tuple(variable._shape), variable._dtype), placed)
        return None
    # MirroredStrategy and one rank have variables of TensorFlow's own
    if not mirrored_strategy.works_by_dtensor(placed.distribution):
        return mirrored_strategy.create(original, variable, initializer, placed)
    layout = layout_on(placed.layout, view_of(placed.distribution))
    shape, dtype = tuple(variable._shape), variable._dtype
    block = creation.block_of(initializer, shape, dtype, is_split=not layout.is_fully_replicated())
    indices = [_index(shape, layout, where) for where in layout.mesh.local_device_locations()]
    # ranks that hold the same block share it
    blocks = {text: block(index) for text, index in {str(index): index for index in indices}.items()}
    _set_value(variable, pack([blocks[str(index)] for index in indices], layout, dtype), placed)
    return None


@hook(
    "keras.Variable",
    "_initialize",
    "makes a DTensor variable of a given value; Keras makes a whole tf.Variable on one device",
)
def initialize(
    distribution: Distribution, original: Callable[..., object], variable: keras.Variable, value: tf.Tensor | np.ndarray
) -> object:
    """Hook on `Variable._initialize`: a variable from a value."""
    # an initialiser, a variable of TensorFlow's own, or a tensor of a graph: Keras's own path
    if callable(value) or isinstance(value, tf.Variable) or not _is_known(value):
        return original(variable, value)
    if variable._shape is None:
        # Keras sets it later, the layout needs it now
        variable._shape = tuple(int(length) for length in cast("tuple[int, ...]", value.shape))
    placed = _layout_for(variable, distribution)
    if is_elsewhere(placed, world().local_ranks):
        _set_absent(variable, placed)
        return None
    if tables.is_table(placed):
        tables.make(variable, _host(value).__getitem__, placed)
        return None
    if not mirrored_strategy.works_by_dtensor(placed.distribution):
        return mirrored_strategy.create(original, variable, value, placed)
    layout = layout_on(placed.layout, view_of(placed.distribution))
    _set_value(variable, from_logical(_host(value), layout, variable._dtype), placed)
    return None


def _is_known(value: object) -> bool:
    return not isinstance(value, tf.Tensor) or hasattr(value, "_numpy_internal")


def _layout_for(variable: keras.Variable, distribution: Distribution) -> KerasLayout:
    placed = keras_layout(variable)
    if placed is not None and placed.distribution.whole is distribution:
        return placed
    return distribution.get_variable_layout(variable) if placed is None else KerasLayout(placed.given, distribution)


def _set_absent(variable: keras.Variable, placed: KerasLayout) -> None:
    old = getattr(variable, "_value", None)
    with tf.init_scope(), tf.device(host_device()):
        absent = AbsentVariable(
            trainable=variable.trainable, dtype=variable._dtype, shape=tuple(variable._shape), name=variable.name
        )
    if old is not None:  # optimizers find their slots by this id
        absent._unique_id = old._unique_id
    variable._value, variable._layout = absent, placed


def _set_value(variable: keras.Variable, value: tf.Tensor, placed: KerasLayout) -> None:
    # a new TensorFlow variable for a new layout: DTensor's variables keep theirs for life
    old = getattr(variable, "_value", None)
    with tf.init_scope():
        variable._value = MeshVariable(value, dtype=variable._dtype, trainable=variable.trainable, name=variable.name)
    if old is not None:  # optimizers find their slots by this id
        variable._value._unique_id = old._unique_id
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
    """Hook on `Variable.assign`: cut host values on the host.

    So no device gets the whole value of a split variable.
    """
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
        array = _host(value)
        if tuple(array.shape) != tuple(variable._shape):
            return original(variable, value)
        value = from_logical(array, target.layout, target.dtype)
    target.assign(value)
    return value


def layout_in_step(variable: keras.Variable, *args: object, **kwargs: object) -> dtensor.Layout | None:
    """Condition of hooks on variables in a step: the layout in which one is used, where that is not its own."""
    placed = keras_layout(variable)
    value = getattr(variable, "_value", None)
    if placed is None or value is None or not isinstance(value, dtensor.DVariable) or not in_step():
        return None
    return gathered(value.layout, placed)


def layout_of_use(variable: keras.Variable, *args: object, **kwargs: object) -> dtensor.Layout | None:
    """Return the layout in which a variable is read; an optimizer computes in the variables' own layouts."""
    return None if updating.get() else layout_in_step(variable)


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


@hook("keras.Variable", "_direct_assign", "a variable on a mesh is updated in its own layout", when=layout_in_step)
def direct_assign(
    _: object, original: Callable[..., object], variable: keras.Variable, value: tf.Tensor | np.ndarray
) -> object:
    """Hook on `Variable._direct_assign` in a step: cut the value as the variable is."""
    return original(variable, cut_as(variable._value, value))


def cut_as(target: dtensor.DVariable, value: tf.Tensor | np.ndarray) -> tf.Tensor:
    """A tensor of a step, in the layout of the variable that it will update."""
    return dtensor.relayout(tf.cast(value, target.dtype), target.layout)


def read_directly(x: object, *args: object, **kwargs: object) -> MeshVariable | None:
    """Condition of the hook on `convert_to_tensor`: a variable on a mesh, outside of steps."""
    return x if isinstance(x, MeshVariable) and x._is_read_directly() else None


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


@hook("keras.Variable", "numpy", "the numpy value of a split DTensor raises", when=value_on_mesh)
@hook(
    "keras:core",
    "convert_to_numpy",
    "the numpy value of a split DTensor raises, in ops.convert_to_numpy",
    when=value_on_mesh,
)
def to_numpy(value: tf.Tensor, original: Callable[..., object], *args: object, **kwargs: object) -> np.ndarray:
    """Hook on `convert_to_numpy` and `Variable.numpy`: the logical value of what is on a mesh."""
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
    ("numpy", "__array__"),
    "while process 0 writes files alone, what is in several processes was read before",
    when=copy_while_writing,
)
@hook(
    "keras:core",
    "convert_to_numpy",
    "while process 0 writes files alone, what is in several processes was read before",
    when=copy_while_writing,
)
def copied(copy: np.ndarray, original: Callable[..., object], *args: object, **kwargs: object) -> np.ndarray:
    """Hook on `convert_to_numpy`, `Variable.numpy` and `__array__`: to read the variable would be a collective."""
    return copy


def _host(value: object) -> np.ndarray:
    if is_dtensor(value):
        return to_host(value)
    return value.numpy() if isinstance(value, tf.Tensor) else np.asanyarray(value)


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
    if mirrored_strategy.is_mirrored_variable(value):
        # a copy that is summed when it is read; the others are equal in all processes
        return value.synchronization == tf.VariableSynchronization.ON_READ
    return is_dtensor(value) and not dtensor.fetch_layout(value).is_fully_replicated()


def place(variable: keras.Variable, layout: KerasLayout) -> None:
    """Move an existing variable to another layout, keeping its value."""
    if variable._value is None:  # made by a symbolic build that has not ended
        variable._layout = layout
        return
    # to a strategy, or away from one
    if mirrored_strategy.is_mirrored(layout.distribution) or mirrored_strategy.is_mirrored_variable(variable._value):
        mirrored_strategy.place(variable, to_host(variable._value), layout)
        if mirrored_strategy.is_mirrored(layout.distribution):
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
        key = variable._value._unique_id  # optimizers find their slots by it
        with tf.device(rank_devices()[layout.distribution.placement.ranks[0]]):
            mirrored_strategy.place(variable, to_host(variable), layout)
        variable._value._unique_id = key
        variable._layout = layout
        return
    target = layout_on(layout.layout, view_of(layout.distribution))
    old = variable._value
    # the same shards on the same devices: only the distribution is another
    if isinstance(old, dtensor.DVariable) and old.layout == target:
        variable._layout = layout
        return
    _set_value(variable, from_logical(to_host(old), target, variable._dtype), layout)


def fill(variable: keras.Variable, part: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
    """Give each rank of this process its part of a value."""
    target = variable._value
    if isinstance(target, AbsentVariable):
        return
    if isinstance(target, tables.ServedTable):
        target.fill(part)
        return
    if not isinstance(target, dtensor.DVariable):
        variable.assign(part(tuple(slice(0, length) for length in variable.shape)))
        return
    index_of = functools.partial(_index, tuple(variable.shape), target.layout)
    parts = [part(index_of(where)) for where in target.layout.mesh.local_device_locations()]
    target.assign(pack(parts, target.layout, target.dtype))


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """rank -> the component on its device."""
    placed = keras_layout(variable)
    value = variable._value
    if isinstance(value, AbsentVariable):
        return {}
    if mirrored_strategy.is_mirrored_variable(value):
        return mirrored_strategy.shards(variable)
    if isinstance(value, tables.ServedTable):
        return value.shards()
    if placed is None or not isinstance(value, dtensor.DVariable):
        return {0 if placed is None else placed.distribution.placement.ranks[0]: to_host(value)}
    parts = dtensor.unpack(value.read_value())
    # `numpy()` would copy
    return {rank: np.asarray(part) for rank, part in zip(view_of(placed.distribution).ranks, parts, strict=True)}
