"""Errors of DTensor on a step that it cannot partition: which operation, of which layer, and what can be done."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow.operators import replicated_operations
from keras_flow.backends.tensorflow.traced_step import NAME_ATTRIBUTE, Trace, WholeOperations
from keras_flow.current import reachable
from keras_flow.errors import FlowError, LayoutFallback, warn

#: model -> layer paths and operations for which the warning was given that every rank computes them whole
_said: WeakKeyDictionary[keras.Model, set[tuple[str, str]]] = WeakKeyDictionary()
_NO_RULE = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")
_NAMED = re.compile(rf'see current operation: .*?"tf\.(\w+)".*?(?:{NAME_ATTRIBUTE} = "([^"]*)"|$)', re.MULTILINE)
_TYPED = re.compile(r"'tf\.(\w+)' op")


def is_of_partitioning(error: tf.errors.OpError) -> bool:
    """Whether an error is of making the ranks' programs, before anything ran; it then names files of DTensor."""
    # a loop's gradient that is traced again, after DTensor failed on it, has the name that it had
    return "tensorflow/dtensor/" in str(error) or "a different function with the same name" in str(error)


def allow_whole(error: tf.errors.OpError, whole: WholeOperations) -> bool:
    """Let the operation of an error run whole on every rank.

    Args:
        error: DTensor has no rule for the operation, or fails with the one it has.
        whole: operations that are whole in this step; that of the error is added.

    Returns:
        Whether something changed: the step may be tried again.
    """
    if match := _NO_RULE.search(str(error)):
        whole.types.add(match[1])
        return replicated_operations.allow_whole_operation(match[1])
    kind, name = _operation(error)
    if kind is None or kind.startswith(("Relayout", "DTensor")):  # these move data, and compute nothing
        return False
    return whole.add(kind, name)


def _operation(error: Exception) -> tuple[str | None, str | None]:
    """Type and name of the operation that an error names; None where it does not."""
    text = str(error)
    if match := _NAMED.search(text):
        return match[1], match[2]
    return (match[1], None) if (match := _TYPED.search(text)) else (None, None)


def say_what_is_whole(model: keras.Model, trace: Trace, whole: WholeOperations) -> None:
    """Warn, once for a layer, of operations in a traced step that every rank computes whole."""
    failed = {(path, kind): None for name, (path, kind) in trace.layers.items() if (kind, name) in whole}
    for path, kind in trace.without_rule | failed:
        if (path, kind) not in _said.setdefault(model, set()):
            _said[model].add((path, kind))
            warn(
                f"{path or model.name}: TensorFlow's DTensor cannot split operation {kind}: every rank gathers its "
                "inputs and computes it whole (the numbers are those of one device, nothing is gained there)",
                LayoutFallback,
            )


def say_runs_on_one_device(model: keras.Model, trace: Trace, error: Exception) -> None:
    """Warn, once for each cause, of a step that DTensor cannot partition even with whole tensors."""
    what = _what_fails(trace, error)
    if ("", what) not in _said.setdefault(model, set()):
        _said[model].add(("", what))
        warn(
            f"{model.name}: TensorFlow's DTensor cannot partition a step{what}: one device computes it from gathered "
            "weights, and the new ones are laid out again (the numbers are those of one device, nothing is gained, "
            "and that device holds the whole model)",
            LayoutFallback,
        )


def variable_of_tensorflow(model: keras.Model) -> str | None:
    """The name of a `tf.Variable`, or the class of a `tf.random.Generator`, that a step may change; None without one.

    It is of no mesh: each rank changes it.
    """
    for kind in (tf.Variable, tf.random.Generator):
        for found, _ in reachable.objects(kind, model):
            if not isinstance(found, dtensor.DVariable):
                return f"tf.Variable {found.name!r}" if isinstance(found, tf.Variable) else "tf.random.Generator"
    return None


def say_eager_steps_run_on_one_device(model: keras.Model, variable: str, strict: bool) -> None:
    """Warn once of eager steps that may change a variable of TensorFlow's own.

    Raises:
        FlowError: the distribution is strict.
    """
    why = (
        f"{model.name}: run_eagerly=True, and the model has a {variable}, which each rank would change (a "
        "keras.Variable is laid over the ranks)"
    )
    if strict:
        raise FlowError(f"{why}. Use run_eagerly=False and strict=False, or a keras.Variable")
    if ("", variable) not in _said.setdefault(model, set()):
        _said[model].add(("", variable))
        warn(
            f"{why}: one device computes its steps from gathered weights, and the new ones are laid out again",
            LayoutFallback,
        )


def refusal(model: keras.Model, trace: Trace, error: Exception) -> FlowError:
    """The error for a step that stays unpartitioned, which names the layers that have the operation."""
    what = _what_fails(trace, error)
    return FlowError(
        f"TensorFlow's DTensor cannot partition a step of model {model.name!r}{what}. The weights are as they were. "
        "Use run_eagerly=False and strict=False (one device then computes the step), broadcast the variables of "
        "these layers and of those beside them, or use the jax or torch backend, which partition it"
    )


def _what_fails(trace: Trace, error: Exception) -> str:
    """The operation of an error, the layers that have such operations, and the first line of the error."""
    if trace.given_up is not None:
        path, kind, why = trace.given_up
        return f", at operation {kind}" + (f" of {path!r}" if path else "") + f": {why}"
    kind, name = _operation(error)
    # in the order in which they were traced, each once
    paths = dict.fromkeys(
        path for each, (path, operation) in trace.layers.items() if path and name in (each, None) and operation == kind
    )
    layers = ", ".join(map(repr, paths))
    # DTensor puts what it was doing in front of the cause, and a C++ trace behind it
    first = str(error).split(" error: ", 1)[-1].splitlines()[0][:300]
    return (f", at operation {kind}" if kind else "") + (f" of {layers}" if layers else "") + f": {first!r}"
