"""`model.export` and `ExportArchive` under a distribution: process 0 writes the model of one device, gathered weights.

Exporters trace the model, and cannot trace distributed tensors: torch.export fails with pages of text, and files of
other formats would hold the part of one process. Inside `whole` the variables have plain values and no distribution is
active, so the file is that of a model which was trained on one device.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from keras_flow import atomic
from keras_flow.backends import object_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.files import shared_files
from keras_flow.backends.hooking import always, hook
from keras_flow.current import models, reachable
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError


def _over_ranks(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook: the distribution of a model (without variables: of the scope), if of several ranks."""
    distribution = shared_files.distribution_of(model)
    return distribution if distribution is not None and not distribution.has_one_rank else None


@hook(
    "keras.Model",
    "export",
    "exporters trace a model on one device; of several processes each would write",
    when=_over_ranks,
)
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
        with whole(model), _beside(filepath) as path:
            original(model, path, format, *args, **kwargs)

    def write_or_say() -> None:
        try:
            write()
        except (FlowError, ValueError, OSError):
            raise  # of what was asked, and said in a line
        except Exception as error:
            if isinstance(error, ImportError) or isinstance(error.__cause__, ImportError):  # torch wraps it
                raise FlowError(
                    f"model.export(format={format!r}): a package that it needs is missing: {error}"
                ) from error
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
def _beside(filepath: str | os.PathLike[str]) -> Iterator[str]:
    """Give a path beside a file or folder, which becomes it; what is said of it names the one that was asked for."""
    said = io.StringIO()
    has_folder = Path(filepath).parent.is_dir()
    with atomic.beside(filepath) if has_folder else nullcontext(filepath) as path:
        try:
            with redirect_stdout(said):
                yield str(path)
        finally:
            # the folder of the meantime alone: a converter breaks the lines that its path stands in
            printed = said.getvalue()
            print(printed.replace(f"{os.sep}{Path(path).parent.name}", "") if has_folder else printed, end="")


def whole(model: keras.Model) -> AbstractContextManager[None]:
    """Inside, the model's variables have plain logical values on one device, and no distribution holds."""
    return shared_files.plain(list(models.all_variables(model, global_seed=True)), [model], {})


def _of_archive(archive: Any, *args: object, **kwargs: object) -> _Given | None:
    """Condition of the hooks on an archive: what it was given.

    None where that has no variables on several ranks, and no scope of several processes is held.
    """
    before = getattr(archive, "_keras_flow_given", None) or _Given([], [], {})
    known = {id(variable) for variable in before.variables}
    found = [variable for variable, _ in reachable.variables(args, kwargs) if id(variable) not in known]
    variables = [*before.variables, *found]
    layers = [getattr(value, "__self__", value) for value in (*args, *kwargs.values())]
    layers = [layer for layer in layers if isinstance(layer, keras.Layer) and layer not in before.layers]
    are_over_ranks = any((layout := keras_layout(each)) and not layout.distribution.has_one_rank for each in variables)
    # of a model without variables, too, one process writes
    if not are_over_ranks and (active() is None or backend().world().process_count == 1):
        return None
    archive._keras_flow_given = _Given(variables, [*before.layers, *layers], before.made)
    return archive._keras_flow_given


@dataclass(frozen=True)
class _Given:
    """The variables and layers that an archive tracks, and by a variable's id the plain value that functions hold."""

    variables: list[keras.Variable]
    layers: list[keras.Layer]
    made: dict[int, Any]


@hook(
    "keras:ExportArchive",
    "__init__",
    "an archive traces functions of the program, which on TensorFlow cannot read weights on several ranks",
    when=always,  # one that is made before the scope may be given a model of it
)
def _archive_is_made(_: object, original: Callable[..., None], archive: object, *args: Any, **kwargs: Any) -> None:
    """Hook on `ExportArchive.__init__`: its methods see variables of several ranks as one device has them."""
    object_hooks.place_before(archive)
    original(archive, *args, **kwargs)


@object_hooks.replaces(
    "keras:ExportArchive",
    ("track", "add_endpoint", "track_and_add_endpoint", "add_variable_collection", "write_out"),
    when=_of_archive,
)
def _into_archive(given: _Given, original: Callable[..., object], archive: object, *args: Any, **kwargs: Any) -> object:
    """Hook on the methods of `ExportArchive`: they see the variables as one device has them; process 0 writes."""
    with shared_files.plain(given.variables, given.layers, given.made):
        if original.__name__ != "write_out":
            return original(archive, *args, **kwargs)

        def write() -> None:
            asked = inspect.signature(original).bind(archive, *args, **kwargs)
            with _beside(asked.arguments["filepath"]) as asked.arguments["filepath"]:
                original(*asked.args, **asked.kwargs)

        if backend().world().process_count == 1:
            write()
        else:
            shared_files.write_here(write, "ExportArchive.write_out")
        return None
