"""Puts the hooks of Keras and of an engine in place, once their places were compared with those of tested versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_flow.backends import fingerprints, hooking, keras_distribution, keras_hooks, object_hooks

if TYPE_CHECKING:
    from keras_flow.backends.interface import Backend

#: engines whose places were compared with tested versions
_compared: set[str] = set()


def install(engine: Backend) -> None:
    """Install the hooks common to all engines and those of `engine`; a second call does nothing.

    Raises:
        FlowError: a name is missing or is not what its hook was written against, because Keras or the engine is of
            another version. One that was not tested and fits is a warning.
    """
    # the engine's first: Keras's entry points, wrapped last, enter a remembered distribution before these ask for it
    hooks = (*engine.hooks(), *keras_hooks.hooks())
    keras_distribution.install()
    if engine.name not in _compared:
        fingerprints.require_fitting(engine.name, (*hooks, *object_hooks.declared(), *engine.privates()))
        _compared.add(engine.name)
    hooking.install_each(hooks)
    object_hooks.install()
    keras_hooks.wrap_loaded()
