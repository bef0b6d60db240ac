"""After a step that failed on the mesh: errors of all ranks are collected, so that the next operation meets none."""

from __future__ import annotations

from typing import cast

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow.variables import to_host
from keras_flow.errors import FlowError

#: what a rank says whose operation was stopped because another rank's had failed
_STOPPED = (tf.errors.CancelledError, tf.errors.AbortedError)
#: of TensorFlow's message where the collectives of the process are ended for good, which is rare and a race: one
#: rank's error reaches another rank's collective before it reaches that rank
_ENDED = "Restart your program to reset"


def root_cause(error: tf.errors.OpError, model: keras.Model) -> tf.errors.OpError | FlowError:
    """The cause of a step's error, which is often raised by a rank that another rank's error stopped."""
    # the first error is that of the rank whose thread was asked first, whichever failed first
    errors = [error, *settle(model)]
    cause = next((each for each in errors if not isinstance(each, _STOPPED)), None)
    # where all ranks were stopped before they began, no error of theirs says why
    if any(_ENDED in each.message for each in errors) or (cause is None and _are_ended(model)):
        return FlowError(
            "TensorFlow has ended the collectives of this process, because a rank failed in a step while others waited "
            f"for it ({'in this step: ' + cause.message if cause else 'an earlier error of this program says why'}). "
            "The weights are as they were before that step and can be read and saved (model.get_weights(), "
            "model.save(...)); to train on, start a new process and load them."
        )
    # the program was accepted, and fails at an operation as it runs: nothing of the user's
    if cause is not None and isinstance(cause, tf.errors.UnimplementedError):
        return FlowError(
            f"TensorFlow cannot run an operation of a step of model {model.name!r} in the layout that DTensor gave it; "
            f"its name has the layer: {cause.message} Broadcast what the rules split of that layer and of those beside "
            "it, or use the jax or torch backend. Weights may have their new values in part: load them again"
        )
    if cause is None:
        return type(error)(
            error.node_def,
            error.op,
            "A rank failed in this step, and TensorFlow tells only of a rank that waited for it; "
            f"model.compile(..., run_eagerly=True) shows the operation that fails. {error.message}",
        )
    return cause


def settle(model: keras.Model) -> list[tf.errors.OpError]:
    """Wait for what still runs and take the errors of its ranks.

    DTensor runs a function on each rank in a thread of its own and keeps what they raise for the operation that
    follows, whatever it is: reading a weight would fail (TensorFlow 2.21).
    """
    # one variable is enough to wait on: every rank's thread takes part in reading it
    target = _on_mesh(model)
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


def _on_mesh(model: keras.Model) -> dtensor.DVariable | None:
    """A variable of the model that all ranks have."""
    values = (getattr(variable, "_value", None) for variable in model.variables)
    return next((value for value in values if isinstance(value, dtensor.DVariable)), None)


def _are_ended(model: keras.Model) -> bool:
    """Whether collectives fail now: tried with a number for each rank of an axis."""
    variable = _on_mesh(model)
    mesh = None if variable is None else variable.layout.mesh
    axis = None if mesh is None else max(mesh.dim_names, key=mesh.dim_size)
    if mesh is None or axis is None or mesh.dim_size(axis) == 1:
        return False
    try:
        split = dtensor.call_with_layout(
            tf.zeros, dtensor.Layout.batch_sharded(mesh, axis, rank=1), (mesh.dim_size(axis),)
        )
        to_host(dtensor.relayout(split, dtensor.Layout.replicated(mesh, rank=1)))
    except tf.errors.OpError:
        settle(model)
        return True
    return False
