"""Gathers inputs and results of operations that DTensor partitions wrongly, as they are added to a step's graph.

TensorFlow's public functions are wrapped in `operations`. Gradients make their operations without these functions, so
they are found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from keras_flow.backends.tensorflow import traced_step
from keras_flow.backends.tensorflow.layouts import relayout, replicated, view_of
from keras_flow.backends.tensorflow.operators.operations import on_operation
from keras_flow.backends.tensorflow.traced_step import WholeOperations
from keras_flow.current.distribution import expected
from keras_flow.scoped import setting

#: operations that DTensor partitions wrongly. ScatterNd: the indices of all rows are used on each rank's rows, which
#: raises on CPUs; accelerators leave out indices that are too large, and the numbers are wrong without an error.
WRONG_WHEN_SPLIT = frozenset({"ScatterNd"})

#: operation -> its input that is a shape, or an order of dims: DTensor must be able to work that out as it compiles
_SHAPES = {"ScatterNd": 2, "Reshape": 1, "BroadcastTo": 1, "Tile": 1, "Fill": 0, "Transpose": 1}
_ALWAYS_WHOLE = WholeOperations(types=set(WRONG_WHEN_SPLIT))
_whole: ContextVar[WholeOperations | None] = ContextVar("keras_flow_whole_operations", default=None)

#: whether the inputs of an operation are being relaid: that also creates operations, which must stay as they are
_laying: ContextVar[bool] = ContextVar("keras_flow_laying_inputs", default=False)


def whole_operations(whole: WholeOperations) -> AbstractContextManager[None]:
    """A step is traced inside, in which these operations are also whole."""
    return setting(_whole, WholeOperations(whole.names, whole.types | WRONG_WHEN_SPLIT))


@on_operation(
    "tensorflow.python.framework.func_graph",
    "FuncGraph._create_op_internal",
    "gradients make operations that DTensor partitions wrongly (ScatterNd: indices of all rows on one rank's)",
)
def create(
    _: object,
    original: Callable[..., tf.Operation],
    graph: tf.Graph,
    op_type: str,
    inputs: Sequence[tf.Tensor],
    *args: object,
    **kwargs: Any,
) -> tf.Operation:
    """Hook on `FuncGraph._create_op_internal`: gather inputs of operations that DTensor partitions wrongly.

    What such an operation returns is also gathered.
    """
    traced_step.before(graph, op_type, inputs)
    # `whole` makes operations itself, which come here again
    if not _laying.get():
        token = _laying.set(True)
        try:
            name = (kwargs.get("name") or "").removesuffix("/")
            inputs = [
                # shapes are constants, which DTensor wants to see as such
                whole(value) if place != _SHAPES.get(op_type) and _is_whole(op_type, name, value) else value
                for place, value in enumerate(inputs)
            ]
            if op_type == "ScatterNd":
                inputs = _with_short_indices(inputs, kwargs)
        finally:
            _laying.reset(token)
    operation = original(graph, op_type, inputs, *args, **kwargs)
    # after it exists, because an error of DTensor names it by its final name
    traced_step.after(operation)
    return operation


def _with_short_indices(inputs: list[tf.Tensor], options: dict[str, Any]) -> list[tf.Tensor]:
    """The inputs of ScatterNd with indices and shape of 32 bits.

    DTensor replaces the shape by one of 32 bits, whatever it was ("expected type int64 != int32").
    """
    indices, updates, shape = inputs
    options["attrs"]["Tindices"].type = tf.int32.as_datatype_enum
    options["input_types"] = None  # those of the inputs themselves
    return [tf.cast(indices, tf.int32), updates, tf.cast(shape, tf.int32)]


def _is_whole(op_type: str, name: str, value: tf.Tensor) -> bool:
    known = _whole.get() or _ALWAYS_WHOLE
    maker = None if hasattr(value, "_numpy_internal") else getattr(value, "op", None)  # an eager tensor has none
    if (op_type, name) not in known and (maker is None or (maker.type, maker.name) not in known):
        return False
    if value.dtype in (tf.resource, tf.variant, tf.string):
        return False
    # a constant is whole anyway, and DTensor may need to see it as one (a shape)
    return bool(value.shape.rank) and tf.get_static_value(value) is None


def whole(value: tf.Tensor) -> tf.Tensor:
    """The tensor, whole on every rank."""
    return relayout(value, replicated(view_of(expected()).mesh, value.shape.rank))
