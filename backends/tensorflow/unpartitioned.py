"""What DTensor says of a step that it cannot partition: which operation, of which layer, and what can be done."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from keras_flow.backends.tensorflow import spmd
from keras_flow.errors import FlowError, LayoutFallback

#: model -> layer paths and operations of which it was said that every rank computes them whole
_said: WeakKeyDictionary[keras.Model, set[tuple[str, str]]] = WeakKeyDictionary()
_NO_RULE = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")
_NAMED = re.compile(r'see current operation: .*?"tf\.(\w+)"|\'tf\.(\w+)\' op')


def is_of_partitioning(error: tf.errors.OpError) -> bool:
    """Whether an error is of making the ranks' programs, before anything ran; it then names files of DTensor."""
    return "tensorflow/dtensor/" in str(error)


def allow_whole(error: tf.errors.OpError, whole: set[str]) -> bool:
    """Let the operation of an error run whole on every rank.

    Args:
        error: DTensor has no rule for the operation, or fails with the one it has.
        whole: types of operations that are whole in this step; that of the second kind of error is added.

    Returns:
        Whether something changed: the step may be tried again.
    """
    if found := _NO_RULE.search(str(error)):
        return spmd.allow_whole_operation(found[1])
    kind = _kind(error)
    if kind is None or kind in whole or kind.startswith(("Relayout", "DTensor")):  # these lay, and compute nothing
        return False
    whole.add(kind)
    return True


def _kind(error: tf.errors.OpError) -> str | None:
    """The type of the operation that an error names."""
    match = _NAMED.search(str(error))
    return next((group for group in match.groups() if group), None) if match else None


def say_what_is_whole(model: keras.Model, function: Callable[..., object], whole: set[str]) -> None:
    """Warn, once for a layer, of operations in a traced step that were found to need whole inputs."""
    for name, kind in _operations(function):
        if kind in spmd.found_on_the_way or kind in whole:
            path = layer_path(model, name) or model.name
            if (path, kind) not in _said.setdefault(model, set()):
                _said[model].add((path, kind))
                warnings.warn(
                    f"{path}: TensorFlow's DTensor cannot split operation {kind}: every rank gathers its inputs and "
                    "computes it whole (the numbers are those of one device, nothing is gained there)",
                    LayoutFallback,
                    stacklevel=2,
                )


def refusal(model: keras.Model, function: Callable[..., object], error: tf.errors.OpError) -> FlowError:
    """The error for a step that stays unpartitioned, which names the layers that have the operation."""
    text = str(error)
    first = text.split(" error: ", 1)[-1].splitlines()[0][:300]
    kind = _kind(error)
    paths = dict.fromkeys(layer_path(model, name) for name, found in _operations(function) if found == kind)
    layers = ", ".join(repr(path) for path in paths if path)
    return FlowError(
        f"TensorFlow's DTensor cannot partition a step of model {model.name!r}"
        + (f", at operation {kind}" if kind else "")
        + (f" of {layers}" if layers else "")
        + f": {first!r}. The weights are as they were. Broadcast the variables of "
        + ("these layers and of those beside them" if layers else "the layers around it")
        + ", or use the jax or torch backend, which partition it"
    )


def layer_path(model: keras.Model, operation: str) -> str | None:
    """The path of the innermost layer of a model in which an operation was made, by its name; None where in none.

    TensorFlow numbers a scope that it meets again: layer `m/dense` makes `m_1/dense_1/MatMul`, its gradient
    `gradient_tape/m_1/dense_1/MatMul`.
    """
    scopes = operation.removeprefix("gradient_tape/").split("/")[:-1]
    best: str | None = None
    for layer in model._flatten_layers():
        parts = (layer.path or layer.name).split("/")
        same = len(parts) <= len(scopes) and all(
            re.fullmatch(re.escape(part) + r"(_\d+)?", scope) for part, scope in zip(parts, scopes, strict=False)
        )
        if same and (best is None or len(parts) > len(best.split("/"))):
            best = "/".join(parts)
    return best


def _operations(function: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """Name and type of each operation of a compiled step; none where it runs eagerly."""
    if not hasattr(function, "_list_all_concrete_functions"):
        return
    for concrete in function._list_all_concrete_functions():  # private; checked with TensorFlow 2.21
        definition = concrete.graph.as_graph_def()
        for nodes in (definition.node, *(inner.node_def for inner in definition.library.function)):
            yield from ((node.name, node.op) for node in nodes)
