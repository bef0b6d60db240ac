"""After a step that failed on the mesh: errors of all ranks are collected, so that the next operation meets none."""

from __future__ import annotations

from typing import cast

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow.variables import to_host

#: what a rank says whose operation was stopped because another rank's had failed
_STOPPED = (tf.errors.CancelledError, tf.errors.AbortedError)


def root_cause(error: tf.errors.OpError, model: keras.Model) -> tf.errors.OpError:
    """The cause of a step's error, which is often raised by a rank that another rank's error stopped."""
    return next((each for each in (error, *settle(model)) if not isinstance(each, _STOPPED)), error)


def settle(model: keras.Model) -> list[tf.errors.OpError]:
    """Wait for what still runs and take the errors of its ranks.

    DTensor runs a function on each rank in a thread of its own and keeps what they raise for the operation that
    follows, whatever it is: reading a weight would fail (TensorFlow 2.21).
    """
    # one variable is enough to wait on: every rank's thread takes part in reading it
    values = (getattr(variable, "_value", None) for variable in model.variables)
    target = next((value for value in values if isinstance(value, dtensor.DVariable)), None)
    errors = []
    # each rank may have an error of the step, and one of the operation after it
    for _ in range(0 if target is None else 2 + 2 * target.layout.mesh.num_local_devices()):
        try:
            to_host(cast("tf.Tensor", target))
            # a value came back, so no rank holds an error any more
            break
        except tf.errors.OpError as error:
            errors.append(error)
    return errors
