"""The hooks of TensorFlow. Checked against keras 3.15, 3.16 (nightly) and tensorflow 2.21."""

from __future__ import annotations

from keras_flow.backends import logical_random
from keras_flow.backends.files import exporting, shared_files
from keras_flow.backends.hooking import Hook, declared
from keras_flow.backends.reading import sources
from keras_flow.backends.tensorflow import (
    convolutions,
    host_calls,
    layers,
    optimizer,
    random,
    reading,
    rematerialized,
    servers,
    tables,
    trainer,
    variables,
)
from keras_flow.backends.tensorflow.mirrored import replica_math, step, strategy
from keras_flow.backends.tensorflow.operators import (
    counting,
    graph_operations,
    images,
    linear_algebra,
    operations,
    slices,
    substitutes,
    windows,
)


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    return (
        *declared(variables, trainer, host_calls),
        *sources.hooks(reading.READER),
        *declared(rematerialized, layers, optimizer, random),
        *declared(operations, graph_operations, substitutes, slices, convolutions, windows),
        *declared(images, counting, linear_algebra, tables, servers),
        *declared(strategy, step, replica_math, shared_files, exporting),
        # asked before what is above on the same functions
        *declared(logical_random),
    )
