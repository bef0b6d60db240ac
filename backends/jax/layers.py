"""Layers on JAX that a distribution changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_flow.backends.hooking import hook
from keras_flow.current.batch_statistics import by_groups, refuse_renorm
from keras_flow.current.distribution import Distribution, active

if TYPE_CHECKING:
    import keras


def wants_replica_statistics(
    layer: keras.layers.BatchNormalization, inputs: object, training: bool | None = None, mask: object = None
) -> Distribution | None:
    """Condition of the hook on `BatchNormalization.call`: the distribution, where it wants statistics by replica."""
    distribution = active() if training and layer.trainable else None
    return distribution if distribution is not None and distribution.batch_statistics == "replica" else None


@hook("keras.layers.BatchNormalization", "call", "statistics by replica where asked for", when=wants_replica_statistics)
def batch_normalization(
    distribution: Distribution,
    original: Callable[..., object],
    layer: keras.layers.BatchNormalization,
    inputs: keras.KerasTensor,
    training: bool | None = None,
    mask: keras.KerasTensor | None = None,
) -> object:
    """Hook on `BatchNormalization.call`: statistics of each replica's rows.

    (Global statistics need no hook: the step sees logical tensors.)
    """
    refuse_renorm(layer)
    return by_groups(original, layer, inputs, distribution.num_model_replicas, training, mask)
