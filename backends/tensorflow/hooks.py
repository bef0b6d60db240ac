"""The hooks of TensorFlow. Checked against keras 3.15, 3.16 (nightly) and tensorflow 2.21."""

from __future__ import annotations

from keras_flow.backends import logical_random
from keras_flow.backends.files import shared_files
from keras_flow.backends.hooking import Hook, declared
from keras_flow.backends.reading import sources
from keras_flow.backends.tensorflow import (
    convolutions,
    counting,
    graph_operations,
    host_calls,
    images,
    layers,
    linear_algebra,
    mirrored_step,
    mirrored_strategy,
    operations,
    optimizer,
    random,
    reading,
    rematerialized,
    replica_math,
    slices,
    substitutes,
    tables,
    trainer,
    variables,
    windows,
)


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    return (
        *declared(variables, trainer, host_calls),
        *sources.hooks(reading.READER),
        *declared(rematerialized, layers, optimizer, random),
        *declared(operations, graph_operations, substitutes, slices, convolutions, windows),
        *declared(images, counting, linear_algebra, tables),
        *declared(mirrored_strategy, mirrored_step, replica_math, shared_files),
        # asked before what is above on the same functions
        *declared(logical_random),
    )
