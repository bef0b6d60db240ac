"""`kf.DistributedDataParallel` on TensorFlow: a function of this process's weights and tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_flow.backends.engine_records import Replica
from keras_flow.backends.traced_by_weights import traced_by_weights


def make_replica(model: keras.Model, ranks: tuple[int, ...], bucket_bytes: int, find_unused: bool) -> Replica:
    """Make a replica that uses a `GradientTape` in a `tf.function`.

    All gradients are there at once, so `kf.comm` averages them.
    """

    def gradients_of(loss_function: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[Any, list[Any]]]:
        @tf.function(reduce_retracing=True)
        def step(*args: Any) -> tuple[Any, list[Any]]:
            with tf.GradientTape() as tape:
                result = loss_function(*args)
            loss = result[0] if has_aux else result
            weights = [each.value for each in model.trainable_weights]
            found = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return result, [tf.convert_to_tensor(each) for each in found]

        return step

    return Replica(model, traced_by_weights(model, gradients_of))
