"""The hooks of torch. Checked against keras 3.15, 3.16 (nightly) and torch 2.13."""

from __future__ import annotations

from keras_flow.backends import logical_random
from keras_flow.backends.files import exporting, shared_files
from keras_flow.backends.hooking import Hook, declared
from keras_flow.backends.reading import sources
from keras_flow.backends.torch import (
    ddp_of_keras,
    gathered_weights,
    generation,
    layers,
    optimizer,
    random,
    reading,
    rematerialized,
    saving,
    split_layers,
    step,
    tables,
    trainer,
    variables,
    wrapped_modules,
)
from keras_flow.backends.torch.operators import attention, reading_dtensors, relayout
from keras_flow.backends.torch.rows import log_readers, losses, metrics, mirrored_calls


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    return (
        # first, so that what Keras does by itself is asked last
        *ddp_of_keras.hooks(),
        *attention.hooks(),
        *declared(variables, gathered_weights, saving, reading_dtensors, trainer),
        *sources.hooks(reading.READER),
        *declared(mirrored_calls, step, rematerialized, layers, split_layers, losses, metrics),
        *declared(log_readers, optimizer, random, logical_random, shared_files, generation, relayout),
        *declared(wrapped_modules, tables, exporting),
    )
