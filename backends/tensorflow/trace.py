"""What a step was traced to: the layers that made its operations, and which of those every rank computes whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import tensorflow as tf
from keras.src.backend.common import global_state

from keras_flow.backends.tensorflow import spmd
from keras_flow.errors import FlowError

#: operations with which DTensor fails late or ends the process (TensorFlow 2.21), and why
_IMPOSSIBLE = {
    "Where": "its shape depends on its values",
    "LookupTableFindV2": "its table lies on no mesh",
    "LookupTableSizeV2": "its table lies on no mesh",
}
_GRADIENT = "gradient_tape/"


@dataclass
class Trace:
    """The operations of one traced step.

    Attributes:
        layers: type of operation -> paths of the layers that have it, in the order of the trace; "" where in none.
        whole: path and type of each operation that has no rule, and reads more than constants and scalars.
        scopes: name scope of the graph -> path of the layer inside of which it was opened.
        given_up: path and type of the operation at which the trace was given up, and why.
    """

    layers: dict[str, dict[str, None]] = field(default_factory=dict)
    whole: dict[tuple[str, str], None] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)
    given_up: tuple[str, str, str] | None = None

    def add(self, scope: str, op_type: str, inputs: Sequence[tf.Tensor]) -> None:
        """Note an operation.

        Args:
            scope: name scope in which it is made; that of a gradient names the scope of what it is the gradient of.
            op_type: its type.
            inputs: its inputs.

        Raises:
            GivenUp: DTensor could not partition the step.
        """
        path = _layer_in_call()
        if path:
            self.scopes[scope] = path
        else:
            path = self.scopes.get(scope.partition(_GRADIENT)[2] or scope, "")
        self.layers.setdefault(op_type, {})[path] = None
        if op_type not in spmd.WITH_RULE and any(_is_split_data(value) for value in inputs):
            self.whole[path, op_type] = None
        if op_type in _IMPOSSIBLE:
            self.given_up = path, op_type, _IMPOSSIBLE[op_type]
            raise GivenUp(op_type)


class GivenUp(FlowError):
    """The trace of a step is given up at an operation of this type."""


_current: ContextVar[Trace | None] = ContextVar("keras_flow_trace", default=None)


@contextmanager
def tracing() -> Iterator[Trace]:
    """A step is traced inside."""
    token = _current.set(trace := Trace())
    try:
        yield trace
    finally:
        _current.reset(token)


def note(graph: tf.Graph, op_type: str, inputs: Sequence[tf.Tensor]) -> None:
    """Note an operation of the step that is being traced, and let it run whole where it has no rule."""
    if op_type not in spmd.WITH_RULE:
        spmd.allow_whole_operation(op_type)
    if (trace := _current.get()) is not None:
        trace.add(graph.get_name_scope(), op_type, inputs)


def _layer_in_call() -> str:
    """The path of the innermost layer whose call is running. Keras's scopes hold their layers; private, Keras 3.15."""
    for scope in reversed(global_state.get_global_attribute("name_scope_stack") or ()):
        if scope.caller is not None:
            return getattr(scope.caller, "path", None) or scope.name
    return ""


def _is_split_data(value: tf.Tensor) -> bool:
    return bool(value.shape.rank) and value.shape.num_elements() != 1 and tf.get_static_value(value) is None
