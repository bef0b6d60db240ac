"""`kf.DistributedDataParallel` on TensorFlow: a function of this process's weights and tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_flow.backends.engine_records import Replica


def make_replica(model: keras.Model, ranks: tuple[int, ...], bucket_bytes: int, find_unused: bool) -> Replica:
    """Make a replica that uses a `GradientTape` in a `tf.function`.

    All gradients are there at once, so `kf.comm` averages them.
    """

    def gradients_of(loss_function: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[Any, list[Any]]]:
        # a trace holds its weights, so that their ids stay their own
        traces: dict[tuple[int, ...], Callable[..., tuple[Any, list[Any]]]] = {}

        def traced(weights: list[keras.Variable]) -> Callable[..., tuple[Any, list[Any]]]:
            @tf.function(reduce_retracing=True)
            def step(*args: Any) -> tuple[Any, list[Any]]:
                with tf.GradientTape() as tape:
                    result = loss_function(*args)
                loss = result[0] if has_aux else result
                values = [each.value for each in weights]
                found = tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
                return result, [tf.convert_to_tensor(each) for each in found]

            return step

        def step(*args: Any) -> tuple[Any, list[Any]]:
            weights = model.trainable_weights  # others, once a layer is frozen
            key = tuple(map(id, weights))
            if key not in traces:
                traces[key] = traced(weights)
            return traces[key](*args)

        return step

    return Replica(model, gradients_of)
