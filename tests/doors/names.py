"""The doors to a model: what Keras's public classes and modules offer before, beside and after training."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

import keras

#: class -> what its doors are called; a name that a base class has is a door of the base class
CLASSES = {
    "Layer": keras.layers.Layer,
    "Model": keras.Model,
    "Optimizer": keras.Optimizer,
    "Metric": keras.Metric,
    "Loss": keras.Loss,
}
#: modules each public name of which is a door
MODULES = ("callbacks", "distillation", "distribution", "export", "models", "saving", "wrappers")


def public() -> list[str]:
    """Return the names of all doors: `Model.fit`, `callbacks.EarlyStopping`, ..."""
    found = []
    for owner, kind in CLASSES.items():
        inherited = set(dir(keras.layers.Layer)) if kind is keras.Model else set()
        found += [f"{owner}.{name}" for name in dir(kind) if not name.startswith("_") and name not in inherited]
    for module in MODULES:
        names = vars(getattr(keras, module))
        found += [f"{module}.{name}" for name, value in names.items() if _is_door(name, value)]
    return sorted(found)


def _is_door(name: str, value: object) -> bool:
    return not name.startswith("_") and not inspect.ismodule(value) and (inspect.isclass(value) or callable(value))


def opened_in(case: Callable[..., object], make: Callable[..., object] | None) -> str:
    """Return the program of a case without its docstring and decorators, with what it uses of the tests' modules."""
    texts, seen = [], set()
    left: list[object] = [case, *([make] if make is not None else [])]
    while left:
        used = left.pop()
        if id(used) in seen or not getattr(used, "__module__", "").startswith("tests.doors.cases"):
            continue
        seen.add(id(used))
        tree = ast.parse(textwrap.dedent(inspect.getsource(used)))  # type: ignore[arg-type]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                node.decorator_list = []
        texts.append(ast.unparse(tree))
        if inspect.isfunction(used):
            variables = inspect.getclosurevars(used)
            left += [*variables.nonlocals.values(), *variables.globals.values()]
    return "\n".join(texts)
