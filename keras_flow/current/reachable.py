"""Finds the variables that a model, an optimizer, a metric, a callback or a function of the user's can reach.

Keras lists the variables that a layer tracks. It does not list those of metrics that were only handed to `compile`, of
losses, of initializers with a seed generator, of callbacks, or of objects that a `train_step` finds by their global
name. A distribution has to lay all of them, so they are found by one walk over attributes, containers and functions.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import TypeAlias, TypeVar

import keras
import numpy as np

from keras_flow.current.keras_places import KerasSaveable
from keras_flow.errors import is_of_user

#: the object that a variable belongs to: the last one on the way to it that makes variables; None where there is none
Owner: TypeAlias = "keras.Layer | keras.Metric | keras.Optimizer | keras.random.SeedGenerator | None"

_OWNERS = (keras.Layer, keras.Metric, keras.Optimizer, keras.random.SeedGenerator)
#: Keras's objects whose attributes may hold variables
_HOLDERS = (
    *(KerasSaveable, keras.random.SeedGenerator, keras.callbacks.Callback, keras.callbacks.CallbackList),
    *(keras.Initializer, keras.Regularizer, keras.optimizers.schedules.LearningRateSchedule),
)
_CONTAINERS = (list, tuple, deque)
Kind = TypeVar("Kind")
#: what containers may have millions of
_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.ndarray, np.generic)


def variables(*roots: object) -> Iterator[tuple[keras.Variable, Owner]]:
    """The variables that can be reached from some objects, each once, with the object that each belongs to.

    Args:
        roots: Keras's objects, functions of the user's, instances of the user's classes, or containers of them.
    """
    return objects(keras.Variable, *roots)


def objects(kind: type[Kind], *roots: object) -> Iterator[tuple[Kind, Owner]]:
    """The objects of a kind that can be reached from some objects, as `variables` finds those of Keras.

    Args:
        kind: their class.
        roots: as those of `variables`.
    """
    seen: set[int] = set()
    waiting: list[tuple[object, Owner]] = [(root, None) for root in reversed(roots)]
    while waiting:
        value, owner = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, kind):
            seen.add(id(value))
            yield value, owner
            continue
        children = _children(value)
        if children:
            seen.add(id(value))
            owner = value if isinstance(value, _OWNERS) else owner
            # in their order: it is that of the messages that ranks exchange
            waiting += [(child, owner) for child in reversed(list(children)) if not isinstance(child, _PLAIN)]


def _children(value: object) -> Collection[object]:
    """The objects that an object holds; none for numbers, texts, arrays and all that cannot hold a variable."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, set | frozenset):  # whose own order differs between processes
        return sorted(value, key=_name)
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, FunctionType):
        return list(_of_function(value))
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    is_of_users_class = _is_of_user(type(value))
    if isinstance(value, _HOLDERS) or is_of_users_class:
        attributes = getattr(value, "__dict__", {}).values()
        return [*attributes, *_of_class(value), *_functions(type(value))] if is_of_users_class else attributes
    return ()


def _name(value: object) -> str:
    """A name that an object has in every process, as far as it has one."""
    return f"{type(value).__qualname__} {getattr(value, 'path', None) or getattr(value, 'name', '')}"


@functools.cache
def _is_of_user(kind: type) -> bool:
    """Whether a class was written by the user: neither installed, nor Python's, nor ours."""
    if kind.__module__ == "builtins":
        return False
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_of_user(file)


def _of_class(value: object) -> Iterator[object]:
    """What the classes that the user wrote hold for an object: their attributes, and its `__slots__`."""
    for cls in filter(_is_of_user, type(value).__mro__):
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):
                yield getattr(value, name, None)
            # functions are looked through by `_functions`; a class has variables that the object need not use
            elif not name.startswith("__") and not isinstance(member, type | FunctionType):
                yield member


@functools.cache
def _functions(kind: type) -> tuple[FunctionType, ...]:
    """The methods and properties that the user wrote for a class or the classes it is derived from."""
    found: list[object] = []
    for cls in kind.__mro__:
        if _is_of_user(cls):
            for member in vars(cls).values():
                found += [member.fget] if isinstance(member, property) else [getattr(member, "__func__", member)]
    return tuple(inspect.unwrap(each) for each in found if isinstance(each, FunctionType))


def _of_function(function: FunctionType) -> Iterator[object]:
    """The objects in a function's closure, in its defaults and, where the user wrote it, under its global names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if is_of_user(function.__code__.co_filename):
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name)
            # classes and modules have variables of their own, which the function need not use
            if not isinstance(value, type) and not inspect.ismodule(value):
                yield value


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The global names that a function reads, functions inside it included."""
    found = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    inner: Iterable[CodeType] = (each for each in code.co_consts if isinstance(each, CodeType))
    return tuple(sorted(found.union(*map(_global_names, inner))))
