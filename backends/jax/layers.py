"""Layers on JAX that a distribution changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_flow.current.batch_statistics import by_groups
from keras_flow.current.distribution import active

if TYPE_CHECKING:
    import keras


def wants_replica_statistics(
    layer: keras.layers.BatchNormalization, inputs: object, training: bool | None = None, mask: object = None
) -> bool:
    """Condition: this call takes statistics, and the distribution wants them for each replica."""
    distribution = active()
    return bool(
        training and layer.trainable and distribution is not None and distribution.batch_statistics == "replica"
    )


def batch_normalization(
    original: Callable[..., object],
    layer: keras.layers.BatchNormalization,
    inputs: keras.KerasTensor,
    training: bool | None = None,
    mask: keras.KerasTensor | None = None,
) -> object:
    """Hook: statistics by replica. (Global statistics need no hook: the step sees logical tensors.)"""
    distribution = active()
    assert distribution is not None
    return by_groups(original, layer, inputs, distribution.num_model_replicas, training, mask)
