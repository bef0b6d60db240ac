"""Models that generate, as KerasHub's tasks do: a model's own `generate` runs under the model's distribution.

Such a model has `generate`, and `make_generate_function`, which returns the function that does the work on tensors and
keeps it as `generate_function`. Keras has no such names, so they are looked for in each class of models, wherever it
comes from: in those that exist as hooks are installed, and in the others as their first model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import keras

from keras_flow.backends.active import backend
from keras_flow.backends.hooking import Hook, wrap
from keras_flow.current import models
from keras_flow.current.distribution import Distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAKE, _GENERATE = "make_generate_function", "generate"


def hooks(entry: Callable[..., object]) -> Sequence[Hook]:
    """The hook that finds classes of models that generate.

    Args:
        entry: the hook on entry points of a model, such as `fit`.
    """

    def wrap_class(cls: type, original: Callable[..., object], model: keras.Model) -> object:
        """Hook on `Trainer.__init__`: the first model of a class that generates."""
        for owner in (cls, *_subclasses(keras.Model)):
            _wrap_names(owner, entry)
        return original(model)

    return (
        Hook(
            "keras.src.trainers.trainer",
            "Trainer.__init__",
            wrap_class,
            "KerasHub's `generate` is no entry point of Keras: it has neither the model's distribution nor its steps",
            when=_class_that_generates,
        ),
    )


def forget(model: keras.Model) -> None:
    """Drop the function that was made for other layouts."""
    if getattr(model, "generate_function", None) is not None:
        model.generate_function = None


def wrap_loaded(entry: Callable[..., object]) -> None:
    """Wrap the names of the classes that exist."""
    for cls in _subclasses(keras.Model):
        _wrap_names(cls, entry)


def _class_that_generates(model: keras.Model) -> type | None:
    cls = type(model)
    function = getattr(cls, _MAKE, None)
    return cls if function is not None and not hasattr(function, "keras_flow_hook") else None


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _wrap_names(cls: type, entry: Callable[..., object]) -> None:
    """Wrap what a class itself defines of the two names, where it has both."""
    if not (hasattr(cls, _MAKE) and hasattr(cls, _GENERATE)):
        return
    why = "as the hook on `Trainer.__init__`"
    wanted = (
        Hook(cls.__module__, f"{cls.__qualname__}.{_MAKE}", _make, why),
        Hook(cls.__module__, f"{cls.__qualname__}.{_GENERATE}", entry, why, when=_distribution_of),
    )
    for name, hook in zip((_MAKE, _GENERATE), wanted, strict=True):
        if name in vars(cls) and not hasattr(vars(cls)[name], "keras_flow_hook"):
            wrap(cls, name, hook)


def _distribution_of(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    return models.distribution_of(model)


def _make(
    distribution: Distribution, original: Callable[..., Callable[..., object]], model: keras.Model
) -> Callable[..., object]:
    """Hook on `make_generate_function`: the function as a step of the distribution."""
    function = original(model)
    if hasattr(function, "keras_flow_step"):
        return function
    step = backend().generate_function(model, distribution, function)
    step.keras_flow_step = True  # type: ignore[attr-defined]
    model.generate_function = step
    return step
