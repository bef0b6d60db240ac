"""Sends a function to the processes of the ranks and its result back, through files."""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import cloudpickle

from keras_flow.backends import random_states
from keras_flow.errors import FlowError
from keras_flow.launch import by_value

#: whether this process is loading what `kf.run` sent: modules imported meanwhile must not start jobs
_loading = False
#: names of Keras's global attributes, and of its config's functions, that a script may have set
_SWITCHES = ("safe_mode_saving", "interactive_logging", "flash_attention", "traceback_filtering")
_LIMITS = ("max_epochs", "max_steps_per_epoch")


def is_loading() -> bool:
    """Whether a rank is importing the module that holds `main`."""
    return _loading


def send(path: Path, main: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Write `main` and its arguments to a file.

    What can be imported is written by name, what `__main__` defines by value.

    Raises:
        FlowError: something in them cannot be pickled; the text names it if it can be told.
    """
    try:
        work = by_value.dumps((main, tuple(args), dict(kwargs), _keras_state()))
    except Exception as error:  # whatever a __reduce__ raises
        raise FlowError(_unsendable(main, args, kwargs, error)) from error
    path.write_bytes(pickle.dumps((list(sys.path), list(sys.argv), work)))


def receive(path: Path) -> Callable[[], object]:
    """Read what `send` wrote.

    Returns:
        A function without arguments that calls `main` with those that were sent.
    """
    global _loading
    # written by the launching process into the private folder of the job
    sys.path[:], sys.argv[:], work = pickle.loads(path.read_bytes())
    _loading = True
    try:
        main, args, kwargs, state = by_value.loads(work)
    finally:
        _loading = False
    _restore(state)
    return lambda: main(*args, **kwargs)


def send_result(path: Path, result: object) -> None:
    """Write what `main` returned.

    Raises:
        FlowError: it cannot be sent.
    """
    try:
        pickled = dumps(result)
    except Exception as error:  # whatever a __reduce__ raises
        raise FlowError(
            f"main returned a {type(result).__name__}, which cannot be sent back to the process that called kf.run: "
            f"{error}. Return numbers, strings, numpy arrays, or lists and dicts of these (or None)."
        ) from error
    path.write_bytes(pickled)


def receive_result(path: Path) -> object:
    """Return what `main` returned on rank 0.

    Raises:
        SystemExit: it called `sys.exit` there, without a failure, as in a process of its own.
    """
    if not path.exists():
        raise SystemExit(0)
    return pickle.loads(path.read_bytes())


def dumps(value: object) -> bytes:
    """Pickle what a program hands back."""
    stream = io.BytesIO()
    _ResultPickler(stream).dump(value)
    return stream.getvalue()


class _ResultPickler(cloudpickle.Pickler):
    """Parts a History from its model, whose weights a rank may not have whole."""

    def reducer_override(self, obj: Any) -> Any:
        keras = sys.modules.get("keras")
        if keras is None or not isinstance(obj, keras.callbacks.History):
            return super().reducer_override(obj)
        kept = {name: value for name, value in vars(obj).items() if name in ("history", "epoch", "params")}
        return keras.callbacks.History, (), kept


def _keras_state() -> dict[str, object]:
    """Return what a script has set up before it calls `kf.run`: Keras's settings, custom objects, random states."""
    state: dict[str, object] = {"random": random_states.states()}
    keras = sys.modules.get("keras")
    if keras is not None:
        # loads Keras, which may not be loaded here
        from keras_flow.current.keras_places import get_global_attribute

        custom = keras.saving.get_custom_objects()
        state["keras"] = {
            "floatx": keras.config.floatx(),
            "epsilon": keras.config.epsilon(),
            "image_data_format": keras.config.image_data_format(),
            "dtype_policy": keras.saving.serialize_keras_object(keras.config.dtype_policy()),
            "switches": {name: get_global_attribute(name) for name in _SWITCHES},
            "limits": {name: getattr(keras.config, name)() for name in _LIMITS if hasattr(keras.config, name)},
            # what a module registers, it does in the rank too, as it is imported
            "custom": {
                name: item
                for name, item in custom.items()
                if ">" not in name or getattr(item, "__module__", "") == "__main__"
            },
        }
    return state


def _restore(state: dict[str, object]) -> None:
    """Set up this process as `_keras_state` describes."""
    settings = state.get("keras")
    if isinstance(settings, dict):
        import keras

        from keras_flow.current.keras_places import set_global_attribute

        keras.config.set_floatx(settings["floatx"])
        keras.config.set_epsilon(settings["epsilon"])
        keras.config.set_image_data_format(settings["image_data_format"])
        keras.config.set_dtype_policy(keras.saving.deserialize_keras_object(settings["dtype_policy"]))
        for name, value in settings["limits"].items():
            getattr(keras.config, f"set_{name}")(value)
        for name, value in settings["switches"].items():
            set_global_attribute(name, value)
        for name, item in settings["custom"].items():
            package, _, short = name.rpartition(">")
            if package:
                keras.saving.register_keras_serializable(package, short)(item)
            else:
                keras.saving.get_custom_objects()[name] = item
    random_states.set_states(cast(Mapping[str, Any], state["random"]), loads=True)


def _unsendable(
    main: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], error: Exception
) -> str:
    name = getattr(main, "__qualname__", repr(main))
    parts: dict[str, object] = {f"argument {place}": value for place, value in enumerate(args)}
    parts |= {f"argument {key!r}": value for key, value in kwargs.items()}
    if inspect.isfunction(main):
        variables = inspect.getclosurevars(main)
        parts |= {
            f"the name {key!r}, which it uses": value
            for key, value in {**variables.globals, **variables.nonlocals}.items()
        }
    culprits = [f"{what} ({type(value).__name__})" for what, value in parts.items() if not _sendable(value)]
    return (
        f"kf.run cannot send {name} to the processes of the ranks: {type(error).__name__}: {error}. "
        + (f"What cannot be sent: {'; '.join(culprits)}. " if culprits else "")
        + "Every rank is a process of its own: create such objects (open files, locks, generators, connections) inside "
        "main, or start the whole script on every rank with `keras-flow launch`, which sends nothing."
    )


def _sendable(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever a __reduce__ raises
        return False
    return True
