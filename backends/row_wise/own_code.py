"""Is what one of Keras's objects computes Keras's own code, or KerasHub's? Asked of the object, not of its class.

A method may be replaced on a layer (`layer.call = ...`) or on its class (`Dense.call = ...`), an activation may be any
function, and a quantizer any object. `row_interaction` believes of Keras's own code alone that it acts row by row.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import types
from pathlib import Path

import keras

import keras_flow.backends
from keras_flow.backends import hooking
from keras_flow.current import keras_places

#: base classes, whose methods compute nothing of a call (training, saving, building) but for those below
_BASES = frozenset(keras.Model.__mro__)
_OF_BASES = frozenset(name for base in _BASES for name in vars(base))
#: methods of base classes that take part in a call; those of quantizations are `_int8_call` and the like
_FORWARD = ("forward", "compute_mask", *sorted(name for name in _OF_BASES if name.strip("_").endswith("call")))
_HUB = importlib.util.find_spec("keras_hub")  # None where it is not installed; its import takes seconds
#: Keras's folder, KerasHub's, and those of what notes the calls of layers, as `dist.verify` does
_FOLDERS = tuple(
    str(Path(str(file)).parent) + "/"
    for file in (keras.__file__, keras_flow.__file__, keras_flow.backends.__file__, *([_HUB.origin] if _HUB else []))
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_OF_WEIGHTS = ("_initializer", "_regularizer", "_constraint")

#: class of Keras -> its methods when they were looked at, and the name of one that is not Keras's own
_of_classes: dict[type, tuple[list[object], str]] = {}
#: how often a class of Keras was found changed
_changes = 0


def changes() -> int:
    """How often a class of Keras was found with other methods than before."""
    return _changes


def look_at_classes() -> None:
    """Look whether somebody has patched a class of Keras since it was looked at."""
    global _changes
    changed = [cls for cls, (methods, _) in _of_classes.items() if not _are_same(methods, _methods_of(cls))]
    for cls in changed:
        del _of_classes[cls]
    _changes += bool(changed)


def replaced_method(thing: keras.Layer | keras.Loss | keras.Metric) -> str:
    """The name of a method in a call of one of Keras's objects that is not its class's; empty where all are."""
    for name, value in vars(thing).items():
        # Keras itself wraps `build` and `quantize` on each layer; they, as all of its base classes, compute no call
        if callable(value) and _is_in_call(name) and hasattr(type(thing), name) and not is_keras(value):
            return name
    return _replaced_on_class(type(thing))


def unknown_function(layer: keras.Layer) -> str:
    """The name of a layer's attribute that is a function of the user's, and not one of its weights; or empty."""
    if isinstance(layer, keras.Model):  # it has functions, of its steps
        return ""
    for name, value in vars(layer).items():
        if name.endswith(_OF_WEIGHTS) or name in _OF_BASES or isinstance(value, keras.Layer):
            continue
        is_function = isinstance(value, _FUNCTIONS) or (name.endswith("activation") and callable(value))
        # by identity: what is given may be callable and have no hash (a dataclass)
        if is_function and id(value) not in _rowwise_functions() and not _is_activation_of_hub(value):
            return name
    return ""


def is_along_last_dim(function: object) -> bool:
    """Whether it is one of Keras's activations along the last dim, which are no longer row-wise for a tensor [rows]."""
    name = getattr(function, "__name__", "")
    return name in ("softmax", "log_softmax", "sparsemax", "glu") and id(function) in _rowwise_functions()


def _is_activation_of_hub(function: object) -> bool:
    """KerasHub's backbones give it to their layers; its code is one call of Keras's `gelu`."""
    return getattr(function, "__name__", "") == "gelu_approximate" and is_keras(function)


def is_largest_of_row(quantizer: object) -> bool:
    """Whether a quantizer of activations takes the largest element of each row, or there is none."""
    if quantizer is None:
        return True
    # Dense and EinsumDense give the axes of a row; where a layer gives none, the quantizer's own hold
    return type(quantizer) is keras.quantizers.AbsMaxQuantizer and quantizer.axis in (None, (-1,))


def is_keras(function: object) -> bool:
    """Whether the code of a function is Keras's or KerasHub's: `functools.wraps` may copy its name and module."""
    function = getattr(function, "__func__", function)
    while _file_of(function) == hooking.__file__ and hasattr(function, "keras_flow_hook"):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return _file_of(function).startswith(_FOLDERS)


def is_wrapped_by_keras(error: BaseException) -> bool:
    """Whether an error is the one that Keras makes of another: a RuntimeError that no code of the user's has raised."""
    trace = error.__traceback__
    if type(error) is not RuntimeError or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(_FOLDERS)


def _replaced_on_class(cls: type) -> str:
    if not keras_places.is_of_keras(cls):  # a class of the user's lives as long as its model
        return _look_at_class(cls)
    known, now = _of_classes.get(cls), _methods_of(cls)
    if known is None or not _are_same(known[0], now):
        known = _of_classes[cls] = (now, _look_at_class(cls))
    return known[1]


def _methods_of(cls: type) -> list[object]:
    """The members of a class that take part in a call: other ones later mean that it was patched."""
    found: list[object] = []
    for owner in cls.__mro__:
        members = vars(owner)
        found += [members.get(name) for name in _FORWARD] if owner in _BASES else members.values()
    return found


def _are_same(first: list[object], second: list[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _look_at_class(cls: type) -> str:
    names = {name for owner in cls.__mro__ if owner not in _BASES for name in vars(owner)} | set(_FORWARD)
    of_keras = {name for owner in cls.__mro__ if keras_places.is_of_keras(owner) for name in vars(owner)}
    for name in sorted(names & of_keras):
        if not _is_in_call(name):
            continue
        # the first in the order of bases is what a call finds
        value = next(vars(owner)[name] for owner in cls.__mro__ if name in vars(owner))
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if callable(value) and not isinstance(value, type) and not is_keras(value):
            return name
    return ""


def _is_in_call(name: str) -> bool:
    return name in _FORWARD or name not in _OF_BASES


def _file_of(function: object) -> str:
    return getattr(getattr(function, "__code__", None), "co_filename", "")


@functools.cache
def _rowwise_functions() -> dict[int, types.FunctionType]:
    """Keras's activations by identity, also as operations: all act element by element, or along the last dim."""
    names = [name for name in dir(keras.activations) if name not in ("get", "serialize", "deserialize")]
    found = [getattr(module, name, None) for module in (keras.activations, keras.ops) for name in names]
    return {id(value): value for value in found if isinstance(value, types.FunctionType)}
