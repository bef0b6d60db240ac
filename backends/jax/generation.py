"""Generation on JAX: XLA partitions a model's own jitted function by the layouts of its weights and its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution


def generate_function(
    model: keras.Model, distribution: Distribution, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function itself: its batch was laid by `keras.distribution.distribute_tensor`, or is on every rank."""

    def generate(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return generate
