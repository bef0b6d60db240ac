"""Initializers and regularizers, by OneFlow's names and arguments: they make Keras's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_flow.compat.oneflow.missing import Names

_of = keras.initializers
_DISTRIBUTIONS = {"random_normal": "untruncated_normal", "random_uniform": "uniform"}


def _scaling(
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "truncated_normal",
    data_format: str = "",
) -> keras.Initializer:
    kind = _DISTRIBUTIONS.get(distribution, distribution)
    return _of.VarianceScaling(scale, mode.replace("average", "avg"), kind)


def _kaiming(
    shape: object = None,
    distribution: str = "random_normal",
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    negative_slope: float = 0.0,
    data_format: str = "NCHW",
) -> keras.Initializer:
    return _scaling(2.0 / (1 + negative_slope**2) if "relu" in nonlinearity else 1.0, mode, distribution)


#: what `flow.` has of them
INITIALIZERS: dict[str, Callable[..., Any]] = {
    "constant_initializer": lambda value=0, dtype=None: _of.Constant(value),
    "zeros_initializer": lambda dtype=None: _of.Zeros(),
    "ones_initializer": lambda dtype=None: _of.Ones(),
    "random_uniform_initializer": lambda minval=0, maxval=1, dtype=None: _of.RandomUniform(minval, maxval),
    "random_normal_initializer": lambda mean=0.0, stddev=1.0, seed=None, dtype=None: _of.RandomNormal(
        mean, stddev, seed
    ),
    "truncated_normal_initializer": lambda mean=0.0, stddev=1.0: _of.TruncatedNormal(mean, stddev),
    "truncated_normal": lambda stddev=1.0: _of.TruncatedNormal(0.0, stddev),
    "xavier_uniform_initializer": lambda data_format="": _of.GlorotUniform(),
    "xavier_normal_initializer": lambda data_format="": _of.GlorotNormal(),
    "glorot_uniform_initializer": lambda data_format="": _of.GlorotUniform(),
    "glorot_normal_initializer": lambda data_format="": _of.GlorotNormal(),
    "variance_scaling_initializer": _scaling,
    "kaiming_initializer": _kaiming,
}
regularizers = Names(
    "regularizers",
    # OneFlow's l2 has the half in it
    l1=lambda l=0.01: keras.regularizers.L1(l),  # noqa: E741
    l2=lambda l=0.01: keras.regularizers.L2(l / 2),  # noqa: E741
    l1_l2=lambda l1=0.01, l2=0.01: keras.regularizers.L1L2(l1, l2 / 2),
)
