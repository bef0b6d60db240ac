"""A model that is trained outside of every distribution, in a job of several ranks: each process trains its own copy.

That is what a forgotten `with distribution.scope():` does, and nothing else shows it: the losses look right.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from keras_flow.backends import active, hooking
from keras_flow.current import keras_places, models
from keras_flow.current.processes import find
from keras_flow.errors import warn

#: whether this process has said it
_is_said = False


def install() -> None:
    """Watch `fit` in a job of several ranks; a second call does nothing."""
    why = "a model that was made and is trained outside of every scope is not distributed, in silence"
    hooking.install_each([hooking.Hook("keras.Model", "fit", _trains_alone, why, when=_ranks_if_alone)])


def _ranks_if_alone(model: keras.Model, *args: object, **kwargs: object) -> int | None:
    """Condition of the hook: how many ranks the job has, where no distribution of anybody's holds for the model."""
    if _is_said or keras_places.current_distribution() is not None or models.remembered(model) is not None:
        return None
    # a strategy of tf.distribute and an optimizer of keras_flow.hvd know of the other ranks themselves
    if getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1) > 1:
        return None
    return None if models.calls_in_step(model) else active.ranks_of_job()


def _trains_alone(
    ranks: int, original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Hook on `fit`: say once, on the first process, that no distribution holds."""
    global _is_said
    _is_said = True
    processes = find()
    if processes.index == 0:
        several = f"each of {processes.count} processes trains a copy of its own"
        warn(
            f"model {model.name!r} is trained outside of every distribution, in a job of {ranks} ranks: "
            f"{several if processes.count > 1 else 'one rank trains'}, on all rows that `fit` is given. Make it and "
            "call `fit` inside `with kf.DataParallel().scope():` (or of another distribution); one that was loaded "
            "is laid out by `kf.DataParallel().apply(model)`"
        )
    return original(model, *args, **kwargs)
