"""MirroredStrategy on TensorFlow: `kf.DataParallel(strategy="mirrored")`."""

from __future__ import annotations

from keras_flow.distributions.distribution import FlowDistribution


def is_mirrored(distribution: FlowDistribution) -> bool:
    """Whether a distribution works by MirroredStrategy."""
    return distribution.strategy == "mirrored"


def is_mirrored_variable(value: object) -> bool:
    return False
