"""The hooks of JAX. Checked against keras 3.15, 3.16 (nightly) and jax 0.10."""

from __future__ import annotations

from keras_flow.backends import logical_random
from keras_flow.backends.files import exporting, shared_files
from keras_flow.backends.hooking import Hook, declared
from keras_flow.backends.jax import (
    convolutions,
    data,
    fourier,
    gathered_weights,
    host_calls,
    layers,
    optimizer,
    reading,
    rematerialized,
    trainer,
    variables,
)
from keras_flow.backends.reading import sources


def hooks() -> tuple[Hook, ...]:
    """The hooks of this engine; those common to all are in `keras_flow.backends.keras_hooks`."""
    return (
        *declared(variables, gathered_weights, data, trainer, host_calls),
        *sources.hooks(reading.READER),
        *declared(rematerialized, convolutions, layers, optimizer, logical_random, fourier, shared_files, exporting),
    )
