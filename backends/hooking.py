"""Hooks: the few named places of Keras and the engines that keras_flow wraps, each inert unless it is asked for.

A hook's condition looks at the call and returns what the replacement needs (the active distribution, the layout of the
variable, the running step), or None: then the original is called untouched. What was found is handed to the
replacement, which therefore asks for nothing again. `install` is called when the first distribution is made, so a
program without one runs plain Keras.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_flow.backends import fingerprints, keras_distribution
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.variable_layout import KerasLayout, keras_layout
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.backends.interface import Backend


def active_distribution(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of most hooks: the active keras_flow distribution."""
    return active()


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
        module: module to import.
        name: function, or `Class.method`, in it.
        replacement: called as `replacement(found, original, *args, **kwargs)`.
        why: which behaviour it changes, and what happens without it.
        when: called as `when(*args, **kwargs)`; returns what the replacement needs, or None to call the original.
        also: other `module:name` that imported the same function by value.
        since: the version of its package that brought the name; older ones that are supported have nothing to wrap.
    """

    module: str
    name: str
    replacement: Callable[..., object]
    why: str
    when: Callable[..., object] = active_distribution
    also: tuple[str, ...] = ()
    since: str = ""

    @property
    def is_there(self) -> bool:
        """Whether its package has the name, or should have it."""
        if not self.since:
            return True
        try:
            _owner(self.module, self.name)
        except FlowError:
            return False
        return True


_installed: set[tuple[str, str, Callable[..., object]]] = set()


def install(engine: Backend) -> None:
    """Install the hooks common to all engines and those of `engine`; a second call does nothing.

    Raises:
        FlowError: a name is missing or is not what its hook was written against, because Keras or the engine is of
            another version. One that was not tested and fits is a warning.
    """
    from keras_flow.backends import keras_hooks

    keras_distribution.install()
    if not _installed:
        fingerprints.require_fitting(engine.name, (*engine.hooks(), *keras_hooks.hooks()))
    # the engine's first: Keras's entry points, wrapped last, enter a remembered distribution before these ask for it
    for hook in (*engine.hooks(), *keras_hooks.hooks()):
        key = (hook.module, hook.name, hook.replacement)
        if key not in _installed and hook.is_there:
            install_one(hook)
            _installed.add(key)
    keras_hooks.wrap_loaded()


def original_of(hook: Hook) -> object:
    """What a hook wraps, as its package has it: without hooks.

    Raises:
        FlowError: its package does not have it.
    """
    owner, attribute = _owner(hook.module, hook.name)
    found = inspect.getattr_static(owner, attribute) if inspect.isclass(owner) else getattr(owner, attribute)
    found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    while hasattr(found, "keras_flow_hook"):
        found = found.__wrapped__
    return found


def install_one(hook: Hook) -> None:
    """Install one hook, which stays for the life of the process.

    Raises:
        FlowError: the name is missing, because Keras or the engine is of another version.
    """
    owner, attribute = _owner(hook.module, hook.name)
    hooked = wrap(owner, attribute, hook)
    for other in hook.also:
        module, _, name = other.partition(":")
        owner, attribute = _owner(module, name)
        setattr(owner, attribute, hooked)


def wrap(owner: object, attribute: str, hook: Hook) -> Callable[..., object]:
    """Wrap an attribute of a module or class by a hook; what it is now."""
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def hooked(*args: object, **kwargs: object) -> object:
        found = hook.when(*args, **kwargs)
        if found is None:
            return original(*args, **kwargs)
        return hook.replacement(found, original, *args, **kwargs)

    hooked.keras_flow_hook = hook  # type: ignore[attr-defined]
    setattr(owner, attribute, hooked)
    return hooked


def _owner(module: str, name: str) -> tuple[object, str]:
    *path, attribute = name.split(".")
    try:
        target: object = importlib.import_module(module)
        for part in path:
            target = getattr(target, part)
        # asked for now, so that a missing name is found as hooks are installed and not in a step
        getattr(target, attribute)
    except (AttributeError, ModuleNotFoundError) as error:
        package = fingerprints.package_of(module)
        raise FlowError(
            f"keras_flow wraps {module}.{name}, which {package} {fingerprints.installed(package)} does not have. "
            f"{fingerprints.advice(package)}"
        ) from error
    return target, attribute
