"""Generation on TensorFlow: one device runs a model's own function, since DTensor cannot partition its loop.

TensorFlow 2.21 ends the process (SIGSEGV) as it compiles a `tf.while_loop` over DTensors that reduces over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from keras_flow.backends.tensorflow.whole_step import WholeStep
from keras_flow.errors import LayoutFallback, warn

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution

#: models of which it was said
_said: WeakSet[keras.Model] = WeakSet()


def generate_function(
    model: keras.Model, distribution: Distribution, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A model's function on one device, from gathered weights."""
    # the function is a `tf.function`, and knows no optimizer
    whole = WholeStep(model, function, distribution, compile=False, with_optimizer=False)

    def generate(*args: object, **kwargs: object) -> object:
        if model not in _said:
            _said.add(model)
            warn(
                f"{model.name}: TensorFlow's DTensor cannot partition the loop over tokens: one device of each process "
                "generates all rows from gathered weights (the tokens are those of one device, nothing is gained, and "
                "that device holds the whole model). jax and torch split rows and heads",
                LayoutFallback,
            )
        return whole.run(*args, **kwargs)

    return generate
