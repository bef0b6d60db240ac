"""Finds the engine that Keras runs on, and the module that is its backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, cast

from keras_flow import settings
from keras_flow.backends.engines import ENGINES, in_words, that_train, unknown
from keras_flow.current.processes import find
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.backends.interface import Backend
    from keras_flow.backends.tensor_engine import TensorEngine


def backend() -> Backend:
    """The folder of the active Keras backend, as a module.

    Raises:
        FlowError: the backend is none of the supported ones, trains nothing, or its engine is not installed.
    """
    name = checked_name()
    if not ENGINES[name].trains:
        raise FlowError(
            f"The active Keras backend is {name!r}, which has global tensors and boxing and trains nothing. Set the "
            f"environment variable KERAS_BACKEND to {in_words(that_train())} before keras is imported."
        )
    return cast("Backend", _folder(name))


@functools.cache  # asked before every redistribution
def tensor_engine() -> TensorEngine:
    """Return the module of the active engine, numpy among them: what boxing and global tensors need.

    Raises:
        FlowError: the backend is none of the supported ones, or its engine is not installed.
    """
    return cast("TensorEngine", _folder(checked_name()))


@functools.cache
def _folder(name: str) -> ModuleType:
    """The module that is an engine's folder."""
    # first, while no module of the folder is half imported: `on_import` asks some of them as Keras is there
    importlib.import_module("keras")
    return importlib.import_module(f"keras_flow.backends.{name}")


def checked_name() -> str:
    """The name of the active Keras backend, which is supported and installed. Loads neither Keras nor an engine."""
    name = backend_name()
    if name not in ENGINES:
        raise FlowError(
            f"{unknown(name, that_train())}. Set the environment variable KERAS_BACKEND to one of these before keras "
            "is imported"
        )
    engine = ENGINES[name]
    # not by an import, which would take seconds and load the engine
    if engine.module not in sys.modules and importlib.util.find_spec(engine.module) is None:
        others = [each for each in that_train() if importlib.util.find_spec(ENGINES[each].module) is not None]
        here = f" to one that is: {', '.join(others)}" if others else " to another backend"
        raise FlowError(
            f"The active Keras backend is {name!r}, but its engine is not installed: no module named "
            f"{engine.module!r}. Install it with `pip install '{engine.extra}'`, or set KERAS_BACKEND{here}."
        )
    return name


def drives_all_ranks() -> bool:
    """Whether one process drives every rank of a host on the active backend. Loads neither Keras nor an engine."""
    return ENGINES[checked_name()].drives_all_ranks


def backend_name() -> str:
    """The name of the active Keras backend, found as Keras finds it (keras/src/backend/config.py, Keras 3.15).

    Keras is asked where it is loaded already; it is not loaded for this, because that loads the engine.
    """
    config = getattr(sys.modules.get("keras"), "config", None)
    # `keras.config` may have been changed by code, which no variable or file shows
    if config is not None and hasattr(config, "backend"):
        return config.backend()
    # from here on the order of Keras's own reading: the variable before the file
    from_environment = os.environ.get("KERAS_BACKEND")
    if from_environment:
        return from_environment
    home = os.path.expanduser("~")
    folder = os.environ.get("KERAS_HOME") or os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras")
    try:
        with open(os.path.join(os.path.expanduser(folder), "keras.json"), encoding="utf-8") as file:
            return json.load(file).get("backend", "tensorflow")
    except (OSError, ValueError):
        return "tensorflow"


def ranks_of_job() -> int:
    """The number of ranks that a launcher of any kind gave this job, without starting an engine; 1 without one."""
    return announced_devices() or find().count


def announced_devices() -> int | None:
    """The number of ranks that `keras-flow launch` or `kf.run` gave this job; None where neither started it.

    Raises:
        FlowError: the environment variable does not hold a number.
    """
    value = settings.read(settings.DEVICES)
    return None if value is None else int(value)
