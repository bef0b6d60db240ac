"""Hooks: the few named places of Keras and the engines that keras_flow wraps, each inert unless it is asked for.

A hook's condition looks at the call and returns what the replacement needs (the active distribution, the layout of the
variable, the running step), or None: then the original is called untouched. What was found is handed to the
replacement, which therefore asks for nothing again. `installing.install` is called when the first distribution is made,
so a program without one runs plain Keras.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import keras

from keras_flow.backends import fingerprints
from keras_flow.current import keras_places
from keras_flow.current.distribution import Distribution, active, applied
from keras_flow.current.variable_layout import KerasLayout, keras_layout
from keras_flow.errors import shorten


def active_distribution(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of most hooks: the active keras_flow distribution."""
    return active()


def applied_distribution(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks that steps without their distribution need as well: one rank alone, a replica."""
    return applied()


def distribution_of_new(made: object, *args: object, layout: object = None, **kwargs: object) -> Distribution | None:
    """Condition of hooks on what makes a variable: the active distribution, else that of the layout that it is given.

    An optimizer that is built outside of the scope gives its slots the layouts of its variables.
    """
    given = layout if isinstance(layout, KerasLayout) else keras_layout(made)
    if given is None or applied() is not None:
        return active()
    return given.distribution.whole


def layout_over_ranks(variable: object, *args: object, **kwargs: object) -> KerasLayout | None:
    """Condition of hooks on methods of variables: the layout of one that is on several ranks."""
    layout = keras_layout(variable)
    return layout if layout is not None and not layout.distribution.has_one_rank else None


def always(*args: object, **kwargs: object) -> bool:
    """Condition of hooks that change nothing without a distribution, or where the original can only raise."""
    return True


@dataclass(frozen=True)
class Hook:
    """One wrapped name.

    Attributes:
        module: its place, as `keras_places` finds it.
        name: function in a module, or method of a class. Wherever else Keras has the function by value, it is wrapped.
        replacement: called as `replacement(found, original, *args, **kwargs)`.
        why: which behaviour it changes, and what happens without it.
        when: called as `when(*args, **kwargs)`; returns what the replacement needs, or None to call the original.
        also: other `module:name` of an engine that imported the same function by value.
    """

    module: str
    name: str
    replacement: Callable[..., object]
    why: str
    when: Callable[..., object] = active_distribution
    also: tuple[str, ...] = ()


_Replacement = TypeVar("_Replacement", bound=Callable[..., object])

#: module of replacements -> its hooks, in the order of its lines
_declared: dict[str, list[Hook]] = {}


def hook(
    place: str,
    names: str | Sequence[str],
    why: str,
    *,
    when: Callable[..., object] = active_distribution,
    also: tuple[str, ...] = (),
) -> Callable[[_Replacement], _Replacement]:
    """Declare that the function below replaces these names of a place; its fields are those of `Hook`.

    Nothing is wrapped yet: `declared` lists what a module declares, and `install_each` puts it in place.

    Example:
        >>> @hook("keras.Model", "summary", "an example", when=always)
        ... def with_a_line(found, original, model, *args, **kwargs):
        ...     print("layers:", len(model.layers))
        ...     return original(model, *args, **kwargs)
        >>> [(each.module, each.name) for each in declared(__name__)]
        [('keras.Model', 'summary')]
    """

    def declare(replacement: _Replacement) -> _Replacement:
        declared_there = _declared.setdefault(replacement.__module__, [])
        for name in [names] if isinstance(names, str) else names:
            declared_there.append(Hook(place, name, replacement, why, when, also))
        return replacement

    return declare


def declared(*modules: ModuleType) -> tuple[Hook, ...]:
    """The hooks of some modules. Of two on one name, the later is asked first, and calls the other as the original."""
    return tuple(each for module in modules for each in _declared.get(module.__name__, ()))


#: id of a function -> the modules of Keras that have it by value, and its name there
_Holders: TypeAlias = dict[int, list[tuple[ModuleType, str]]]

#: the place, the name and the replacement's name of what is installed: by name, so that a module that is loaded again
#: does not wrap twice
_installed: set[tuple[str, str, str]] = set()


def install_each(hooks: Iterable[Hook]) -> None:
    """Install hooks that are not in place yet."""
    keyed = {(hook.module, hook.name, _full_name(hook.replacement)): hook for hook in hooks}
    new = {key: hook for key, hook in keyed.items() if key not in _installed and fingerprints.is_there(hook)}
    holders = _holders(new.values())
    for key, hook in new.items():
        install_one(hook, holders)
        _installed.add(key)


def _full_name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def install_one(hook: Hook, holders: _Holders | None = None) -> None:
    """Install one hook, which stays for the life of the process.

    Args:
        hook: the hook.
        holders: what `_holders` found for many hooks. The wrapped function is added, for the next hook on its name.

    Raises:
        FlowError: the name is missing, because Keras or the engine is of another version.
    """
    holders = _holders([hook]) if holders is None else holders
    owner, attribute = owner_of(hook)
    others = holders.get(id(getattr(owner, attribute)), [])
    hooked = wrap(owner, attribute, hook)
    for holder, name in others:
        setattr(holder, name, hooked)
    holders[id(hooked)] = others
    for other in hook.also:
        module, _, name = other.partition(":")
        setattr(keras_places.owner(module, name), name, hooked)


def _holders(hooks: Iterable[Hook]) -> _Holders:
    """Find what holds by value what hooks on modules wrap: after `from module import function` each has a name for it.

    All modules are read once: reading them for each hook anew was most of the time of the first distribution.

    Raises:
        FlowError: as `install_one`.
    """
    found: _Holders = {}
    for hook in hooks:
        fingerprints.original_of(hook)  # a missing name is found as hooks are installed and not in a step
        owner, attribute = owner_of(hook)
        if isinstance(owner, ModuleType):
            found[id(getattr(owner, attribute))] = []
    for place, module in list(sys.modules.items()) if found else []:
        if place.partition(".")[0] == "keras" and isinstance(module, ModuleType):
            for name, value in vars(module).items():
                if id(value) in found:
                    found[id(value)].append((module, name))
    return found


def wrap(owner: object, attribute: str, hook: Hook) -> Callable[..., object]:
    """Wrap an attribute of a module or class by a hook, and return the wrapper, which the attribute is from now on."""
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def hooked(*args: object, **kwargs: object) -> object:
        found = hook.when(*args, **kwargs)
        if found is None:
            return original(*args, **kwargs)
        try:
            return hook.replacement(found, original, *args, **kwargs)
        except Exception as error:
            if keras.config.is_traceback_filtering_enabled():
                shorten(error)
            raise

    hooked.keras_flow_hook = hook  # type: ignore[attr-defined]
    setattr(owner, attribute, hooked)
    return hooked


def owner_of(hook: Hook) -> tuple[Any, str]:
    """The module or class that has what a hook wraps, and its name there."""
    return keras_places.owner(hook.module, hook.name), hook.name.rpartition(".")[2]
