"""Keras's own data parallelism on PyTorch, since Keras 3.16, which begins by itself: kept away from what is not its.

Keras wraps a model in `DistributedDataParallel`, and sums the state of its metrics over all processes, wherever a
process group exists and no distribution is set, or a `keras.distribution.DataParallel`. A group that keras_flow made
is no sign that a program wants that: without a distribution each process then trains by itself, as before 3.16, and
under a distribution of keras_flow gradients and metrics are those of the logical batch already. A program that joins a
process group itself, or sets a distribution of Keras, has what Keras does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import keras

from keras_flow.backends import hooking
from keras_flow.backends.hooking import Hook, hook
from keras_flow.backends.torch import processes
from keras_flow.current import keras_places, models


def hooks() -> tuple[Hook, ...]:
    """The hooks that keep it away; none where Keras has nothing of it."""
    if not hasattr(keras.Model, "_initialize_ddp"):
        return ()
    return hooking.declared(sys.modules[__name__])


def keep_away() -> None:
    """Put the hooks in as a process group is made, where no distribution was made yet."""
    hooking.install_each(hooks())


def stays_away(model: keras.Model, *args: object, **kwargs: object) -> bool | None:
    """Condition of the hooks: the model has a distribution of keras_flow, or no one asked Keras to distribute it."""
    if models.distribution_of(model) is not None:
        return True
    return True if keras_places.current_distribution() is None and processes.has_joined() else None


@hook(
    "keras:trainer",
    "_gather_non_batch_axes",
    "`predict` would return the rows of one rank: Keras's own distributions feed each process its rows",
)
def _as_they_are(_: object, original: Callable[..., object], data: object) -> object:
    """Hook on the trainer's `_gather_non_batch_axes`: outputs stay what they are, and are read as logical tensors."""
    return data


@hook(
    "keras.Model",
    "_initialize_ddp",
    "the model of a step whose gradients are summed already, or of a process that trains alone, would be wrapped in "
    "DistributedDataParallel",
    when=stays_away,
)
def _leave_unwrapped(_: object, original: Callable[..., object], model: keras.Model) -> None:
    """Hook on `Trainer._initialize_ddp`: no wrapper, and none of a time when Keras distributed the model."""
    if getattr(model, "ddp_model", None) is not None:
        object.__setattr__(model, "ddp_model", None)


@hook(
    "keras.Model",
    "get_metrics_result",
    "the state of metrics is that of the logical batch; summed over the ranks again, counts are wrong",
    when=stays_away,
)
def _logical_result(_: object, original: Callable[..., object], model: keras.Model) -> object:
    """Hook on `Trainer.get_metrics_result`: that of Keras for all engines."""
    base: Any = keras_places.Trainer
    return unwrap(vars(base)["get_metrics_result"])(model)
