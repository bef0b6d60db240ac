"""Initializers and regularizers, by OneFlow's names and arguments: they make Keras's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_flow.compat.oneflow.missing import Names
from keras_flow.errors import FlowError

_of = keras.initializers
_DISTRIBUTIONS = {"random_normal": "untruncated_normal", "random_uniform": "uniform"}


class Scaling(_of.VarianceScaling):
    """A variance by the fans of Keras's order of dims, in layers; `of_variable` takes those of OneFlow's."""

    data_format = ""


def _scaling(
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "truncated_normal",
    data_format: str = "",
) -> Scaling:
    made = Scaling(scale, mode.replace("average", "avg"), _DISTRIBUTIONS.get(distribution, distribution))
    made.data_format = data_format
    return made


def _kaiming(
    shape: Sequence[int],
    distribution: str = "random_normal",
    mode: str = "fan_in",
    nonlinearity: str | None = "leaky_relu",
    negative_slope: float | None = 0.0,
    data_format: str = "NCHW",
) -> keras.Initializer:
    slope = 0.01 if negative_slope is None else negative_slope
    gains = {None: 1.0, "sigmoid": 1.0, "tanh": 25 / 9, "relu": 2.0, "leaky_relu": 2 / (1 + slope**2)}
    if nonlinearity not in gains or len(shape) < 2:
        raise FlowError(
            f"flow.kaiming_initializer({tuple(shape)}, nonlinearity={nonlinearity!r}): legal are shapes of two dims or "
            f"more, and one of {list(gains)}"
        )
    return of_variable(_scaling(gains[nonlinearity], mode, distribution, data_format), shape)


def own_draws(initializer: Any) -> Any:
    """An initializer with a seed of its own, unless it was given one: Keras's draws the same values each time."""
    return initializer.clone() if isinstance(initializer, keras.Initializer) else initializer


def of_variable(initializer: Any, shape: Sequence[int], seed: int | None = None) -> Any:
    """The initializer of a variable whose dims have OneFlow's order, [outputs, inputs, ...] or the inputs last."""
    if isinstance(initializer, Scaling) and len(shape) > 1:
        is_last = initializer.data_format.upper().endswith("C")
        fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[1:-1] if is_last else shape[2:])
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[initializer.mode]
        deviation = math.sqrt(initializer.scale / fan)
        if initializer.distribution == "uniform":
            return _of.RandomUniform(-math.sqrt(3) * deviation, math.sqrt(3) * deviation, seed)
        if initializer.distribution == "truncated_normal":  # by the deviation of a normal one that is cut at 2
            return _of.TruncatedNormal(0.0, deviation / 0.87962566103423978, seed)
        return _of.RandomNormal(0.0, deviation, seed)
    if seed is not None and isinstance(initializer, keras.Initializer) and "seed" in initializer.get_config():
        return type(initializer).from_config({**initializer.get_config(), "seed": seed})
    return "zeros" if initializer is None else own_draws(initializer)


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
    **{
        f"{name}_{kind}_initializer": functools.partial(_scaling, 1.0, "fan_avg", f"random_{kind}")
        for name in ("xavier", "glorot")
        for kind in ("uniform", "normal")
    },
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
