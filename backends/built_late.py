"""A model that is made in a scope and gets its weights after it: a subclass, a `Sequential` without `Input`.

Weights tell which distribution a model has. Until they are there, the scope of its making does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras

from keras_flow.backends.hooking import Hook, hook, wrap
from keras_flow.current import models
from keras_flow.current.distribution import Distribution


@hook(
    "keras.Layer",
    "__call__",
    "a model that is built by a call after its scope would have the weights of no distribution",
    when=models.awaits_variables,
)
def _built_late(distribution: Distribution, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Hook on what builds a model: enter the scope that it was made in."""
    with distribution.scope():
        return original(*args, **kwargs)


@hook(
    "keras:AnyTrainer",
    "__init__",
    "a model whose variables come with the first batch, or with `build` after the scope, would not be distributed",
)
def _made(distribution: Distribution, original: Callable[..., None], model: keras.Model) -> None:
    """Hook on `Trainer.__init__`: remember the scope, also for `build`, which Keras wraps on each layer, too."""
    original(model)
    models.made_under(distribution, model)
    awaits = functools.partial(models.awaits_variables, model)
    wrap(model, "build", Hook("keras.Model", "build", _built_late, "", awaits))
