"""Python functions called in the middle of a compiled step, on TensorFlow: a function of NumPy in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow import collectives
from keras_flow.backends.tensorflow.trainer import refuse_jit_of_calls
from keras_flow.current.models import calls_in_step

if TYPE_CHECKING:
    import keras

#: what a function has raised in a graph, which TensorFlow makes a text of
_raised: list[Exception] = []


def dense(gradient: Any) -> Any:
    """The gradient as a tensor: that of an embedding is rows and their indices."""
    return tf.convert_to_tensor(gradient)


def call_in_step(
    function: Callable[[list[Any]], list[Any]],
    values: Sequence[Any],
    pullback: Callable[[list[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Call a function of tensors in a step, compiled or not; it returns tensors of the same dtypes and shapes.

    Steps are not compiled by XLA (`jit_compile=True`), which has no such calls.
    """
    if pullback is not None:
        return collectives.with_gradient(
            lambda given: call_in_step(function, given), lambda given: call_in_step(pullback, given), values
        )
    if tf.executing_eagerly():
        return function(list(values))

    def run(*arrays: Any) -> list[Any]:
        try:
            return [tf.convert_to_tensor(each).numpy() for each in function([tf.constant(each) for each in arrays])]
        except Exception as error:
            _raised.append(error)
            raise

    results = tf.numpy_function(run, list(values), [each.dtype for each in values])
    for result, value in zip(results, values, strict=True):
        result.set_shape(value.shape)
    return list(results)


def steps_that_call(model: keras.Model, *args: object) -> bool | None:
    """Condition of `with_own_errors`: an optimizer of the model says that it calls `call_in_step`."""
    return True if calls_in_step(model) else None


@hook(
    "keras.Model",
    "_make_function",
    "an error of a collective in a step (keras_flow.hvd) would be 60 lines of TensorFlow's around its text",
    when=steps_that_call,
)
def with_own_errors(
    _: object, original: Callable[..., Callable[..., object]], model: keras.Model, step: Callable[..., object]
) -> Callable[[object], object]:
    """Hook on `TensorFlowTrainer._make_function`: raise what a function has raised, and not a text of it."""
    refuse_jit_of_calls(model)  # the model may have got its optimizers after `compile`
    steps = original(model, step)

    def run(iterator: object) -> object:
        _raised.clear()
        try:
            return steps(iterator)
        except tf.errors.OpError:
            if _raised:
                raise _raised.pop() from None
            raise

    return run
