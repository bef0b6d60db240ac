"""Methods that act otherwise on objects of Keras, by one hook for many: callbacks where a loop hands them its model.

Each such object is then of a class that stands right before Keras's own in the order of bases. What a subclass of the
user's does around `super().on_epoch_end()` stays outside, as it would if the method of Keras's class were wrapped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras

from keras_flow.backends import fingerprints, hooking
from keras_flow.backends.hooking import Hook, active_distribution, always, hook, wrap
from keras_flow.current import keras_places

_Replacement = TypeVar("_Replacement", bound=Callable[..., object])

#: what modules declare, in the order in which they are loaded
_declared: list[Hook] = []
#: class of Keras -> the class that stands before it
_parts: dict[type, type] = {}


def replaces(
    place: str, methods: str | Sequence[str], *, when: Callable[..., object] = active_distribution
) -> Callable[[_Replacement], _Replacement]:
    """Declare that the function below replaces methods of objects of a class, as `hooking.hook` does of the class."""

    def declare(replacement: _Replacement) -> _Replacement:
        why = inspect.getdoc(replacement).partition(": ")[2].partition("\n")[0]  # type: ignore[union-attr]
        for method in [methods] if isinstance(methods, str) else methods:
            each = Hook(place, method, replacement, why, when)
            _declared.append(each)
            if _parts:  # a module that is loaded after a distribution was made, such as that of Checkpoint
                _put(each)
        return replacement

    return declare


def declared() -> tuple[Hook, ...]:
    """What modules declare: compared with tested versions as hooks are."""
    return tuple(_declared)


def install() -> None:
    """Make the classes that stand before Keras's, and the hook that places them; once."""
    hooking.install_each(hooking.declared(sys.modules[__name__]))
    for each in _declared if not _parts else ():
        _put(each)


def _put(each: Hook) -> None:
    if fingerprints.is_there(each):
        kind = keras_places.find(each.module)
        part = _parts[kind] = _parts.get(kind) or _before(kind)
        wrap(part, each.name, each)


@hook(
    "keras.callbacks.CallbackList",
    "set_model",
    "what acts at steps and epochs of a loop, and callbacks that write files: without it each process orders its rows "
    "and writes by itself, and none waits for the others where a notebook, kf.on_preemption or Checkpoint stops it",
    when=always,  # each method has a condition of its own
)
def _handed_model(
    _: object, original: Callable[..., None], callbacks: keras.callbacks.CallbackList, model: Any
) -> None:
    """Hook on `CallbackList.set_model`: a loop is about to begin."""
    for each in (callbacks, *callbacks.callbacks):
        place_before(each)
    original(callbacks, model)


def place_before(thing: object) -> None:
    """Place what is declared for the classes of an object before them."""
    for kind, part in _parts.items():
        cls = type(thing)
        if cls is kind:
            thing.__class__ = part
        elif isinstance(thing, kind) and not isinstance(thing, part):
            thing.__class__ = _before(cls, part)


def _before(*bases: type) -> type:
    """A class that is named as the first of its bases."""
    first = bases[0]
    return type(first)(first.__name__, bases, {"__module__": first.__module__, "__reduce_ex__": _reduced})


def _reduced(callback: Any, protocol: int) -> object:
    """Copies and pickles of a callback are of the class that it had before."""
    placed = plain = type(callback)
    while vars(plain).get("__reduce_ex__") is _reduced:
        plain = plain.__bases__[0]
    callback.__class__ = plain
    try:
        return callback.__reduce_ex__(1)  # those of later protocols are compared with the class of the object
    finally:
        callback.__class__ = placed
