"""TensorFlow's variables on a mesh: what they are read as outside of steps, and what stands for absent ones."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context, record
from tensorflow.python.ops import resource_variable_ops

from keras_flow.backends.tensorflow.layouts import in_step
from keras_flow.backends.tensorflow.mesh_values import from_logical, is_dtensor, is_known, join, on_host
from keras_flow.current.keras_places import in_stateless_scope, in_symbolic_scope
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

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


class ReadByKeras:
    """A variable of TensorFlow that a variable of Keras holds, by which it is read.

    Attributes:
        holder: the variable of Keras.
    """

    holder: ref[keras.Variable]

    def numpy(self) -> np.ndarray:
        """The logical value; a collective where other processes have parts of it."""
        if not tf.executing_eagerly():
            return super().numpy()  # type: ignore[misc]  # TensorFlow's own error
        return np.array(self.holder())


class MeshVariable(ReadByKeras, dtensor.DVariable):
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
        if not self.is_read_directly():
            return super().value()
        # a graph inside a direct call (`tf.vectorized_map`) captures what is read eagerly; the tapes see both
        with context.eager_mode():
            resource_variable_ops.variable_accessed(self)
            with record.stop_recording(), tf.device(own_device(self.layout.mesh)):
                value = join(self.read_value(), tf.identity, tf.concat)
            # as TensorFlow's private `record` is told of ReadVariableOp (resource_variable_ops, 2.21)
            record.record_operation(
                "ReadVariableOp", [value], [self.handle], lambda upstream: [upstream], lambda tangent: [tangent]
            )
            return value

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Rows of the value."""
        if not self.is_read_directly():
            return super().sparse_read(indices, name)
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Elements of the value."""
        if not self.is_read_directly():
            return super().gather_nd(indices, name)
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: object, *args: object, **kwargs: object) -> object:
        """Set the value, in the variable's layout. Outside of steps each rank's part of it is cut on the host."""
        return super().assign(self._laid(value), *args, **kwargs)

    def assign_add(self, delta: object, *args: object, **kwargs: object) -> object:
        """Add to the value; as `assign`."""
        return super().assign_add(self._laid(delta), *args, **kwargs)

    def assign_sub(self, delta: object, *args: object, **kwargs: object) -> object:
        """Subtract from the value; as `assign`."""
        return super().assign_sub(self._laid(delta), *args, **kwargs)

    def scatter_update(self, sparse_delta: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        """Set some rows of the value. Slices become dense, because DTensor cannot scatter into a split table.

        Slices of one row should be equal: TensorFlow takes one of them, and here their mean is taken.
        """
        count = self._dense(tf.IndexedSlices(tf.ones_like(sparse_delta.values), sparse_delta.indices))
        rows = tf.math.divide_no_nan(self._dense(sparse_delta), count)
        return self.assign(tf.where(count > 0, rows, self.value()))

    def scatter_add(self, sparse_delta: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        """Add to some rows of the value."""
        return self.assign_add(self._dense(sparse_delta))

    def scatter_sub(self, sparse_delta: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        """Subtract from some rows of the value."""
        return self.assign_sub(self._dense(sparse_delta))

    def _dense(self, slices: tf.IndexedSlices) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(slices.values, slices.indices, self.shape[0])

    def _laid(self, value: Any) -> object:
        if isinstance(value, dtensor.DVariable):
            value = value.read_value()
        if in_step():
            # DTensor may have computed it in another layout
            return dtensor.relayout(tf.cast(value, self.dtype), self.layout)
        if not self.is_read_directly():
            if not in_symbolic_scope() and _has_argument(value):
                what = f"variable {self.name!r} is assigned a value computed from an argument of the function; it is"
                raise FlowError(in_a_function(what))
            return value
        if is_dtensor(value):
            return value
        tensor = tf.convert_to_tensor(value, self.dtype)
        if not is_known(tensor):
            raise FlowError(
                f"{self.name!r} is assigned in a graph within a direct call, as the function of ops.vectorized_map is "
                "one (a random number assigns its seed): outside of steps a variable on several ranks is assigned "
                "eagerly. Draw and assign outside of that function, use ops.map, or compute it by predict or fit"
            )
        return from_logical(on_host(tensor), self.layout, self.dtype)

    def is_read_directly(self) -> bool:
        """Whether it is read as a plain tensor now."""
        if in_step() or (updating.get() and tf.executing_eagerly()):
            return False
        if tf.executing_eagerly() or called_directly.get():
            return True
        # Keras's inference of shapes computes nothing, and seeds may be read in the graph of an input pipeline
        if self.dtype.is_floating and not in_symbolic_scope() and not in_stateless_scope():
            raise FlowError(in_a_function(f"variable {self.name!r} is"))
        return False


def is_watched(variable: keras.Variable) -> bool:
    """Whether gradient tapes see a new variable of TensorFlow for a variable of Keras, as they have seen that before.

    It is as Keras made it: a layer that is frozen when it is laid may be trained later, and a tape is told once.
    """
    old = getattr(variable, "_value", None)
    return variable.trainable if old is None else old.trainable


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


class StageVariable(ReadByKeras, resource_variable_ops.ResourceVariable):
    """A variable of a pipeline's stage that this process has on one rank, and sends to all that read it."""


class AbsentVariable(ReadByKeras, resource_variable_ops.UninitializedVariable):
    """A placeholder, without memory, for a variable of a pipeline's stage that another process has.

    To read it is an error of TensorFlow's. To assign to it does nothing here: the process that has it does that.
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
        "`predict_step` of a model, which keras_flow compiles for all ranks. tf.saved_model.save makes such functions: "
        "write a SavedModel with model.export(path)"
    )


def own_device(mesh: dtensor.Mesh) -> str:
    """The device of this process's first rank on a mesh: what is called outside of steps is computed there."""
    return mesh.local_devices()[0]
