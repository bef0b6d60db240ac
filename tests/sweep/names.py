"""The public names of Keras that compute something, found by introspection."""

from __future__ import annotations

import inspect

import keras

#: module -> whether functions count, besides classes
MODULES = {
    "layers": False,
    "losses": False,
    "metrics": False,
    "optimizers": False,
    "regularizers": False,
    "constraints": False,
    "initializers": False,
    "ops": True,
    "random": True,
}


def public(module: str) -> list[str]:
    """The names of one public module of Keras, `ops.add`; a class under several names has its own one only."""
    owner = getattr(keras, module)
    found = set()
    for name in dir(owner):
        value = getattr(owner, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value):
            found.add(value.__name__ if getattr(owner, value.__name__, None) is value else name)
        elif MODULES[module] and callable(value):
            found.add(name)
    return sorted(f"{module}.{name}" for name in found)
