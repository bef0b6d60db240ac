"""A model that is made in a scope and gets its weights after it: a subclass, a `Sequential` without `Input`.

Weights tell which distribution a model has. Until they are there, the scope of its making does.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from keras_flow.backends.hooking import hook
from keras_flow.current import models
from keras_flow.current.distribution import Distribution

_LATE = "a model that is built after its scope, by hand or by a call, would have the weights of no distribution"


@hook(
    "keras:AnyTrainer",
    "__init__",
    "a model whose variables come with the first batch, after the scope, would not be distributed",
)
def _made(distribution: Distribution, original: Callable[..., None], model: keras.Model) -> None:
    """Hook on `Trainer.__init__`: remember the scope."""
    original(model)
    models.made_under(distribution, model)


@hook("keras.Sequential", "build", _LATE, when=models.awaits_variables)
@hook("keras.Model", "build", _LATE, when=models.awaits_variables)
@hook("keras.Layer", "__call__", _LATE, when=models.awaits_variables)
def _built_late(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Hook on what builds a model: enter the scope that it was made in."""
    with distribution.scope():
        return original(model, *args, **kwargs)
