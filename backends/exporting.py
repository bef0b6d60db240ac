"""`model.export` under a distribution: process 0 writes the model of one device, from gathered weights.

The exporters trace the model, which they cannot where its variables are distributed tensors: torch.export ends in pages
of text, and other formats would hold one process's part. Inside `whole` a model's variables have plain values, and no
distribution holds, so the file is that of a model which was trained on one device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_flow import atomic
from keras_flow.backends import shared_files
from keras_flow.backends.active import backend
from keras_flow.backends.hooking import Hook
from keras_flow.current import models
from keras_flow.current.distribution import Distribution, holding
from keras_flow.errors import FlowError


def hooks() -> tuple[Hook, ...]:
    """The hook on `Model.export`."""
    return (
        Hook(
            "keras.Model",
            "export",
            export,
            "exporters trace a model on one device; of several processes each would write",
            when=_over_ranks,
        ),
    )


def _over_ranks(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook: the distribution of a model whose variables are on several ranks."""
    distribution = models.remembered(model)
    return distribution if distribution is not None and not distribution.has_one_rank else None


def export(
    _: Distribution,
    original: Callable[..., object],
    model: keras.Model,
    filepath: str | os.PathLike[str],
    format: str = "tf_saved_model",
    *args: Any,
    **kwargs: Any,
) -> None:
    """Hook on `Model.export`: process 0 writes it from plain copies of the weights, beside its name, and renames.

    Raises:
        FlowError: a package that the format needs is not installed, or the exporter fails.
    """

    def write() -> None:
        has_folder = Path(filepath).parent.is_dir()
        with whole(model), atomic.beside(filepath) if has_folder else nullcontext(filepath) as path:
            original(model, str(path), format, *args, **kwargs)

    def write_or_say() -> None:
        try:
            write()
        except ImportError as error:
            raise FlowError(f"model.export(format={format!r}): a package that it needs is missing: {error}") from error
        except (FlowError, ValueError, OSError):
            raise  # of what was asked, and said in a line
        except Exception as error:
            raise FlowError(
                f"model.export(format={format!r}): Keras's exporter for {backend().name} failed, on the model as one "
                f"device has it: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            ) from error

    if backend().world().process_count == 1:
        write_or_say()
    else:
        # no exporter writes an optimizer
        shared_files.write_alone(write_or_say, model, "export", models.all_variables)


@contextmanager
def whole(model: keras.Model) -> Iterator[None]:
    """Inside, the model's variables have plain logical values on one device, and no distribution holds."""
    variables = [variable for variable in models.all_variables(model) if variable._value is not None]
    values = [_logical(variable) for variable in variables]  # while all are on the ranks
    kept = [(variable._value, getattr(variable, "_layout", None)) for variable in variables]
    with holding(None):
        try:
            for variable, value in zip(variables, values, strict=True):
                variable._layout = None
                variable._value = backend().plain_value(variable, value)
            backend().track(model)
            yield
        finally:
            for variable, (value, layout) in zip(variables, kept, strict=True):
                variable._value, variable._layout = value, layout
            backend().track(model)


def _logical(variable: keras.Variable) -> np.ndarray:
    copy = shared_files.copy_of(variable)
    return np.asarray(variable) if copy is None else copy
