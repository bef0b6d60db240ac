"""Methods that KerasHub's models have beside those of Keras's: `generate`, and those that write files.

Keras has no such names, so they are looked for in each class of models, wherever it comes from: in those that exist as
hooks are installed, and in the others as their first model is made. A model that generates has `generate`, and
`make_generate_function`, which returns the function that does the work on tensors and keeps it as `generate_function`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_flow import atomic
from keras_flow.backends.active import backend
from keras_flow.backends.files import exporting, shared_files
from keras_flow.backends.hooking import Hook, active_distribution, wrap
from keras_flow.backends.reading import batch_watch
from keras_flow.current import models
from keras_flow.current.distribution import Distribution
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GENERATE = "generate"
_MAKE, _EXPORT = "make_generate_function", "export_to_transformers"
_WRITE = ("save_to_preset", "save_lora_weights", _EXPORT)
_NAMES = (_MAKE, GENERATE, *_WRITE)


@functools.cache  # one replacement for all distributions
def hooks(entry: Callable[..., object]) -> Sequence[Hook]:
    """The hook that finds classes of models that have such methods.

    Args:
        entry: the hook on entry points of a model, such as `fit`.
    """

    def wrap_class(cls: type, original: Callable[..., object], model: keras.Model) -> object:
        """Hook on `Trainer.__init__`: the first model of a class that has such methods."""
        for owner in (cls, *_subclasses(keras.Layer)):
            _wrap_names(owner, entry)
        return original(model)

    return (
        Hook(
            "keras:AnyTrainer",
            "__init__",
            wrap_class,
            "KerasHub's `generate` and `save_to_preset` are no entry points of Keras: they know no distribution",
            when=_class_to_wrap,
        ),
    )


def forget(model: keras.Model) -> None:
    """Drop the function that was made for other layouts."""
    if getattr(model, "generate_function", None) is not None:
        model.generate_function = None


def require_alike(distribution: Distribution, given: Mapping[str, object], by_own_steps: bool) -> None:
    """Compare what the processes are given to generate from: each would take its rows of its own prompts.

    Args:
        distribution: of several ranks.
        given: the arguments of `generate`, by name.
        by_own_steps: whether the distribution makes the steps, and places weights where these need them.

    Raises:
        FlowError: they differ, or a process does not have the weights.
    """
    if by_own_steps:
        raise FlowError(
            f"kf.{type(distribution).__name__} does not generate in several processes, as each has a part of the "
            "weights: generate under kf.DataParallel or kf.ModelParallel, which save and load the same files"
        )

    def compared(leaf: object) -> object:
        if keras.ops.is_tensor(leaf):
            return keras.ops.convert_to_numpy(leaf)
        return np.asarray(leaf) if isinstance(leaf, str | bytes | int | float) else leaf

    batch_watch.BatchWatch().see((keras.tree.map_structure(compared, dict(given)),))


def wrap_loaded(entry: Callable[..., object]) -> None:
    """Wrap the names of the classes that exist, among them tokenizers and converters, which are layers."""
    for cls in _subclasses(keras.Layer):
        _wrap_names(cls, entry)


def _class_to_wrap(model: keras.Model) -> type | None:
    cls = type(model)
    functions = (getattr(cls, name, None) for name in _NAMES if name != GENERATE or hasattr(cls, _MAKE))
    unknown = any(function is not None and not hasattr(function, "keras_flow_hook") for function in functions)
    return cls if unknown else None


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _wrap_names(cls: type, entry: Callable[..., object]) -> None:
    """Wrap what a class itself defines of the names."""
    replacements: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {}
    if hasattr(cls, _MAKE) and hasattr(cls, GENERATE):
        replacements |= {_MAKE: (_make, active_distribution), GENERATE: (entry, models.distribution_of)}
    if hasattr(cls, _WRITE[0]):
        replacements |= dict.fromkeys(_WRITE, (_write, shared_files.distribution_of))
    why = "as the hook on `Trainer.__init__`"
    for name, (replacement, condition) in replacements.items():
        if name in vars(cls) and not hasattr(vars(cls)[name], "keras_flow_hook"):
            wrap(cls, name, Hook(cls.__module__, f"{cls.__qualname__}.{name}", replacement, why, condition))


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


def _write(
    _: Distribution,
    original: Callable[..., object],
    model: keras.Model,
    path: str | os.PathLike[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Hook on `save_to_preset` and others that write: process 0 does, beside the name, and renames."""
    # transformers' names and shapes are computed from the weights; tokenizers have none
    computes = original.__name__ == _EXPORT and isinstance(model, keras.Model)

    def write() -> None:
        with exporting.whole(model) if computes else nullcontext():
            if not Path(path).parent.is_dir():
                original(model, path, *args, **kwargs)
                return
            with atomic.beside(path) as new:
                original(model, str(new), *args, **kwargs)

    shared_files.once(write, model, original.__name__)
