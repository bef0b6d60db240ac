"""The trace of a step: the layers that made its operations, and which of those every rank computes whole."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import smart_cond

from keras_flow.backends.tensorflow.mesh_values import is_dtensor
from keras_flow.backends.tensorflow.operators import replicated_operations
from keras_flow.current.models import layer_in_call
from keras_flow.errors import FlowError

#: attribute of an operation with its name: DTensor prints attributes in its errors, and no names
NAME_ATTRIBUTE = "_keras_flow_name"
#: operations with which DTensor fails late or ends the process (TensorFlow 2.21), and why
_BRANCHES = "DTensor ends the process on branches whose gradients need what they computed"
_PYTHON = "DTensor ends the process on a function of Python, or waits for it for ever"
_IMPOSSIBLE = {
    "Where": "its shape depends on its values",
    "LookupTableFindV2": "its table is not on the mesh",
    "LookupTableSizeV2": "its table is not on the mesh",
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), _BRANCHES),
    **dict.fromkeys(("While", "StatelessWhile"), "DTensor computes some loops wrongly, those of a scan"),
    **dict.fromkeys(("PyFunc", "PyFuncStateless", "EagerPyFunc"), _PYTHON),
}
#: operations that change a resource begin so, but for those that read it
_CHANGING = ("Assign", "Resource", "Rng", "Stateful")
_READING = ("ResourceGather", "ResourceGatherNd", "ResourceStridedSlice")
_PLAIN = "it changes a tf.Variable, which each rank would change (a keras.Variable is laid over the ranks)"
#: operations that draw -> the first of their inputs that is no seed: every rank draws the whole, as in `random`
_PARAMETERS = {"StatelessRandomGammaV3": 4, "StatelessRandomBinomial": 2}
_GRADIENT = "gradient_tape/"
#: after so many failures of one type of operation all of that type are whole, so that steps are not traced endlessly
_MOST_FAILURES = 2


@dataclass
class WholeOperations:
    """The operations of a step that get whole inputs, because DTensor failed on them.

    Attributes:
        names: name of an operation -> its type.
        types: types of which every operation is whole.
    """

    names: dict[str, str] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)

    def __contains__(self, operation: tuple[str, str]) -> bool:
        """Whether an operation, by type and name, is whole."""
        op_type, name = operation
        return op_type in self.types or name in self.names

    def add(self, op_type: str, name: str | None) -> bool:
        """Note that DTensor failed on an operation; whether something changed, so that the step may be tried again."""
        if op_type in self.types:
            return False
        # an operation that failed as a whole one fails by another of its type; then all of the type are whole
        if name is None or name in self.names or Counter(self.names.values())[op_type] + 1 >= _MOST_FAILURES:
            self.types.add(op_type)
        else:
            self.names[name] = op_type
        return True


@dataclass
class Trace:
    """The operations of one traced step.

    Attributes:
        layers: name of an operation -> the path of its layer ("" outside of all) and its type.
        without_rule: path and type of each operation that has no rule, and reads more than constants and scalars.
        scopes: name scope of the graph -> path of the layer whose call made operations in it.
        given_up: path and type of the operation at which the trace was given up, and why.
        rows_are_split: whether the rows of the batch are; if not, every rank computes all.
        rows: how many they are; None where the graph takes any number.
    """

    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
    without_rule: dict[tuple[str, str], None] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)
    given_up: tuple[str, str, str] | None = None
    rows_are_split: bool = False
    rows: int | None = None

    def layer_of(self, scope: str) -> str:
        """The path of the layer whose call, or the gradient of whose call, makes operations in a name scope."""
        if path := _path_in_call():
            return path
        # the scope of a gradient names that of the operation it is the gradient of
        scope = scope.partition(_GRADIENT)[2] or scope
        while scope and scope not in self.scopes:
            scope = scope.rpartition("/")[0]
        return self.scopes.get(scope, "")


class GivenUp(FlowError):
    """The trace of a step is given up at an operation of this type."""


_current: ContextVar[Trace | None] = ContextVar("keras_flow_trace", default=None)


@contextmanager
def tracing(rows_are_split: bool, rows: int | None) -> Iterator[Trace]:
    """A step is traced inside."""
    token = _current.set(trace := Trace(rows_are_split=rows_are_split, rows=rows))
    try:
        yield trace
    finally:
        _current.reset(token)


def rows_are_split() -> bool:
    """Whether the step that is being traced computes a batch whose rows are split."""
    trace = _current.get()
    return trace is not None and trace.rows_are_split


def split_rows() -> int | None:
    """How many rows the batch has whose step is being traced, where they are split and known."""
    trace = _current.get()
    return trace.rows if trace is not None and trace.rows_are_split else None


def before(graph: tf.Graph, op_type: str, inputs: Sequence[tf.Tensor]) -> None:
    """An operation will be made in the step that is being traced: it may run whole where it has no rule.

    Raises:
        GivenUp: DTensor could not partition the step.
    """
    if op_type not in replicated_operations.WITH_RULE:
        replicated_operations.allow_whole_operation(op_type)
    trace = _current.get()
    if trace is None:
        return
    # the layer is noted now: when DTensor compiles the graph, no call is running any more
    path = trace.layer_of(graph.get_name_scope())
    if op_type in _IMPOSSIBLE:
        if isinstance(layer_in_call(), keras.optimizers.Optimizer):
            # `Where` finds the rows of a sparse gradient, and branches (accumulation, loss scales) have no gradients
            return
        _give_up(trace, path, op_type, _IMPOSSIBLE[op_type])
    read = inputs[_PARAMETERS.get(op_type, 0) :]
    if op_type in _PARAMETERS and all(smart_cond.smart_constant_value(value) is not None for value in read):
        return
    if op_type not in replicated_operations.WITH_RULE and any(_is_data(value) for value in read):
        trace.without_rule[path, op_type] = None


def _is_off_the_mesh(resource: tf.Tensor) -> bool:
    """Whether a resource is a variable of TensorFlow's own, of which all ranks have the same one."""
    found: tf.Tensor | None = resource
    while found is not None and tf.is_symbolic_tensor(found):  # captured, by one graph from another
        graph: Any = found.graph
        found = next((outer for outer, inner in graph.captures if inner is found), None)
    with tf.init_scope():
        return found is not None and not is_dtensor(found)


def _changes(op_type: str, attributes: Mapping[str, Any]) -> bool:
    """Whether an operation, or one in a function that it calls, changes a resource that it is given."""
    if not op_type.endswith("PartitionedCall"):
        return op_type.startswith(_CHANGING) and op_type not in _READING
    called: Any = context.get_function_def(attributes["f"].func.name)
    return any(_changes(node.op, node.attr) for node in called.node_def)


def _give_up(trace: Trace, path: str, op_type: str, why: str) -> None:
    trace.given_up = path, op_type, why
    raise GivenUp(op_type)


def after(operation: tf.Operation) -> None:
    """An operation was made: an error of DTensor will tell its name, and the trace its layer.

    Raises:
        GivenUp: the shape of its result is not known. DTensor would cut pieces of no rows from it beside a split
            operand, at which TensorFlow ends the collectives of the process. Or every rank would change one variable.
    """
    # private; checked with TensorFlow 2.21
    operation._set_attr(NAME_ATTRIBUTE, attr_value_pb2.AttrValue(s=operation.name.encode()))
    if (trace := _current.get()) is not None:
        scope = operation.name.rpartition("/")[0]
        trace.layers[operation.name] = trace.layer_of(scope), operation.type
        if path := _path_in_call():
            trace.scopes[scope] = path
        resources = [value for value in operation.inputs if value.dtype == tf.resource]
        if resources and _changes(operation.type, operation.node_def.attr) and any(map(_is_off_the_mesh, resources)):
            _give_up(trace, trace.layers[operation.name][0], operation.type, _PLAIN)
        if _loses_its_shape(operation) and not isinstance(layer_in_call(), keras.optimizers.Optimizer):
            _give_up(trace, trace.layers[operation.name][0], operation.type, "the shape of its result is not known")


def _loses_its_shape(operation: tf.Operation) -> bool:
    """Whether an operation without a rule makes a tensor of unknown shape out of known ones.

    Where an operation has a rule DTensor works shapes out that are not known yet (`Reshape` by another's `Shape`).
    """
    if operation.type in replicated_operations.WITH_RULE - {"Unique"}:
        return False
    tensors = [*operation.inputs, *operation.outputs]
    if any(tensor.dtype in (tf.resource, tf.variant, tf.string) for tensor in tensors):
        return False
    known = [tensor.shape.is_fully_defined() for tensor in tensors]
    count = len(operation.inputs)
    return all(known[:count]) and not all(known[count:])


def _path_in_call() -> str:
    layer = layer_in_call()
    return getattr(layer, "path", None) or getattr(layer, "name", "")


def _is_data(value: tf.Tensor) -> bool:
    return bool(value.shape.rank) and value.shape.num_elements() != 1 and tf.get_static_value(value) is None


def compiled(step: Callable[..., object]) -> Callable[..., object]:
    """A step as a graph.

    TensorFlow counts how often a function is traced again by its code object, and those that `do_not_convert` returns
    share one: a few models, or batches of a few sizes, were warned of "retracing". A partial counts by itself.
    """
    return tf.function(functools.partial(tf.autograph.experimental.do_not_convert(step)), reduce_retracing=True)
