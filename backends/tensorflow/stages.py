"""Stages of a pipeline on TensorFlow: the forward and backward pass of a `tf.function`, on the device of its rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from keras_flow.backends.tensorflow import processes, trainer
from keras_flow.backends.tensorflow.devices import rank_devices
from keras_flow.current.distribution import Distribution


class _GraphStage:
    """A stage as a graph, whose gradient TensorFlow makes.

    Args:
        function: takes weights, tensors and others, and returns what has gradients, and all else.
        rank: its device computes.
        compiled: whether to make a graph.
    """

    def __init__(self, function: Callable[..., Any], rank: int, compiled: bool):
        self._rank = rank
        self._function = tf.function(function, autograph=False) if compiled else function

    def run(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any]:
        """Compute the stage without gradients."""
        with tf.device(rank_devices()[self._rank]):
            return self._function(list(weights), list(tensors), on(self._rank, others))

    def forward(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any, Any]:
        """Compute the stage; also the tape for its backward pass."""
        # a tape tells tensors apart: one that is given twice would have two gradients added up
        sources = ([tf.identity(value) for value in weights], [tf.identity(value) for value in tensors])
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs, rest = self.run(*sources, others)
        return outputs, rest, (tape, outputs, sources)

    def backward(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Gradients by the weights, and by the tensors that were received.

        Args:
            held: what `forward` returned.
            from_next: gradients by the tensors sent, from the stage that got them; None for no such.
            scale: the gradient by the sum of the stage's losses.
        """
        tape, outputs, sources = held
        given = [None] * (len(outputs) - 1) if from_next is None else from_next
        with tf.device(rank_devices()[self._rank]):
            upstream = [
                tf.zeros_like(output) if gradient is None else gradient
                for output, gradient in zip(outputs[:-1], given, strict=True)
            ]
            upstream.append(tf.fill(outputs[-1].shape, tf.cast(scale, outputs[-1].dtype)))
            weights, tensors = tape.gradient(outputs, sources, output_gradients=upstream)
            # messages between processes have no slices
            of_weights = weights if processes.joined().count == 1 else map(_dense, weights)
            return list(of_weights), [_dense(each) for each in tensors]

    def backward_inputs(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Gradients by the tensors that were received, and those by the weights.

        A graph's gradient is one function: asked for one part, it computes both.
        """
        by_weights, by_received = self.backward(held, from_next, scale)
        return by_received, by_weights

    def backward_weights(self, later: list[Any]) -> list[Any]:
        """Gradients by the weights, which are there."""
        return later


def stage_program(
    function: Callable[..., Any], rank: int, compiled: bool, split: Distribution | None = None
) -> _GraphStage:
    """A stage's function as what computes it, and its gradients, on a rank."""
    return _GraphStage(function, rank, compiled)


def compiled(function: Callable[..., Any], rank: int, is_compiled: bool) -> Callable[..., Any]:
    """A function of values that is computed on the device of a rank."""
    program = tf.function(function, autograph=False) if is_compiled else function

    def call(*values: Any) -> Any:
        with tf.device(rank_devices()[rank]):
            return program(*on(rank, values))

    return call


def on(rank: int, structure: Any, split: Distribution | None = None) -> Any:
    """A structure of tensors on the device of a rank; numbers become tensors, which a graph does not fix."""
    with tf.device(rank_devices()[rank]):
        return tree.map_structure(_here, structure)


def _here(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, str):
        return leaf
    if isinstance(leaf, tf.Tensor | tf.IndexedSlices):
        return tf.identity(leaf)
    return tf.constant(leaf, tf.float32 if isinstance(leaf, float) else None)


def add(total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Add gradients one by one; None where there is neither summand.

    Slices of an embedding's rows stay slices, of which one row may have several: optimizers square them one by one.
    """
    sums = []
    for one, other in zip(total, more, strict=True):
        with tf.device(None if one is None else one.device):
            sums.append(other if one is None else one if other is None else _added(one, other))
    return sums


def _added(one: Any, other: Any) -> Any:
    if not isinstance(one, tf.IndexedSlices) or not isinstance(other, tf.IndexedSlices):
        return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)
    indices = tf.concat([one.indices, tf.cast(other.indices, one.indices.dtype)], 0)
    return tf.IndexedSlices(tf.concat([one.values, other.values], 0), indices, one.dense_shape)


def read(variable: keras.Variable) -> tf.Tensor:
    """The value of a variable, on its device."""
    value: Any = variable._value
    with tf.device(value.device):
        return tf.convert_to_tensor(value)


def write(variable: keras.Variable, value: tf.Tensor) -> None:
    """Give a variable a value."""
    stored: Any = variable._value
    with tf.device(stored.device):
        stored.assign(value)


def apply_gradients(
    optimizer: Any,
    parts: Sequence[tuple[int, list[keras.Variable], list[Any]]],
    is_compiled: bool,
    programs: dict[Any, Any],
) -> None:
    """Update the weights of all ranks in one graph: TensorFlow computes each where its variable is."""
    variables = [variable for _, of_rank, _ in parts for variable in of_rank]
    gradients = [gradient for *_, of_rank in parts for gradient in of_rank]
    if not is_compiled:
        optimizer.apply(gradients, variables)
        return
    key = tuple(map(id, (optimizer, *variables)))
    if key not in programs:

        def update(gradients: Any) -> None:
            optimizer.apply(gradients, variables)

        # the rows of a table that a batch uses are as many as it likes
        programs[key] = tf.function(update, autograph=False, reduce_retracing=True)
    programs[key](gradients)


def step_function(model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the function that Keras's loop calls: it takes an iterator, or for `predict` a list of batches."""
    trainer.refuse_jit(model)
    if name != "predict":
        return trainer.in_turn(model, lambda data, _: step(data))

    def function(batches: list[Any]) -> Any:
        outputs = [step(data) for data in batches]
        return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *rows: tf.concat(rows, 0), *outputs)

    return function


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)
