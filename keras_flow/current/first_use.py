"""Which line of the user's program used the engine first? For the error of a `kf.init` that comes too late.

Engines do not say what initialised them (JAX's arrays know the line that made them, see `backends/jax/devices.py`). So
the lines that ran before are read: of the notebook's cells, of the user's modules, and of the functions on the stack
down to the call. A line that calls Keras, the engine or keras_flow is a candidate, unless known as harmless.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, ModuleType

from keras_flow.errors import is_of_user

#: engine -> what was found for its first `kf.init` that came too late, which is itself a use of it for the next one
_found_first: dict[str, dict[str, str]] = {}

#: beginnings of names that leave an engine alone
_HARMLESS = (
    *("keras.config.", "keras.utils.", "keras.datasets.", "keras.mixed_precision.", "keras.backend.", "jax.config."),
    *("tensorflow.config.set_", "tensorflow.config.list_physical_", "keras_flow.Placement", "keras_flow.placement"),
    *("keras_flow.sbp.", "keras_flow.Layout", "keras_flow.boxing.plan", "keras_flow.notebook."),
)


def in_words(lines: Mapping[str, str]) -> str:
    """Lines of programs, place -> text, as the end of an error; empty where there are none.

    Example:
        >>> in_words({"train.py, line 3": "model = keras.Sequential()"})
        ' Before it came: train.py, line 3, `model = keras.Sequential()`.'
    """
    shown = "; ".join(f"{place}, `{text}`" for place, text in list(lines.items())[:3])
    return f" Before it came: {shown}." if shown else ""


def first_uses(engine: str) -> dict[str, str]:
    """Return where the program may have initialised the engine: place -> line, in the order in which they ran.

    Args:
        engine: the name of its module.
    """
    if engine in _found_first:
        return _found_first[engine]
    roots = (engine, "keras", "keras_flow")
    found: dict[str, str] = {}
    for place, source, names, last in _ran_before():
        for line in _calls(source, names, roots, last):
            text = source.splitlines()[line - 1].strip()
            found.setdefault(f"{place}, line {line}", text if len(text) < 80 else f"{text[:77]}...")
    _found_first[engine] = found
    return found


def line_of(file: str, number: int) -> dict[str, str]:
    """A line that an engine names: place -> text."""
    return {f"{_place(file)}, line {number}": linecache.getline(file, number).strip()}


def _place(file: str) -> str:
    if not file.startswith("<ipython") and "ipykernel" not in file:
        return Path(file).name
    source = "".join(linecache.getlines(file)).strip()
    return next((f"cell {number}" for number, cell in _cells() if cell.strip() == source), "a cell")


def _cells() -> list[tuple[int, str]]:
    """The cells of a notebook that ran, and the one that runs, with their numbers."""
    cells = getattr(sys.modules.get("__main__"), "In", [])  # of IPython
    return list(enumerate(cells))[1:] if isinstance(cells, list) else []


def _ran_before() -> Iterator[tuple[str, str, Mapping[str, object], int | None]]:
    """Yield the code that ran before: its place, source, names, and the line that is running (None: all of it ran)."""
    main = sys.modules.get("__main__")
    for number, cell in _cells()[:-1]:  # the last one is running
        yield f"cell {number}", cell, vars(main), None
    stack, frame = [], sys._getframe(2)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            stack.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    # the main program may also be there by other names, and has not ended
    running = {frame.f_code.co_filename for frame in stack} | {getattr(main, "__file__", None)}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if file and file not in running and file.endswith(".py") and is_of_user(file):
            yield _place(file), "".join(linecache.getlines(file)), vars(module), None
    for frame in reversed(stack):
        yield (*_source_of(frame), frame.f_lineno)


def _source_of(frame: FrameType) -> tuple[str, str, Mapping[str, object]]:
    file = frame.f_code.co_filename
    lines = linecache.getlines(file, frame.f_globals)[: frame.f_lineno]
    if frame.f_code.co_name != "<module>":  # of a function only its own lines ran for certain
        lines = [*["\n"] * frame.f_code.co_firstlineno, *lines[frame.f_code.co_firstlineno :]]
        margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        lines = [line[margin:] if line.strip() else "\n" for line in lines]
    return _place(file), "".join(lines), {**frame.f_globals, **frame.f_locals}


def _calls(source: str, names: Mapping[str, object], roots: tuple[str, ...], last: int | None) -> Iterator[int]:
    """Lines of calls outside of functions and before `last` that use one of the packages."""
    try:
        statements = _parsed(source)
    except SyntaxError:
        return
    waiting: list[ast.AST] = list(reversed(statements))
    while waiting:
        node = waiting.pop()
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if last is not None and line >= last:
            continue
        if isinstance(node, ast.Call) and _uses(_dotted(node.func), names, roots):
            yield line
            continue
        waiting += reversed([*ast.iter_child_nodes(node)])


def _parsed(source: str) -> list[ast.stmt]:
    """The statements; of a source that ends inside one (the running call) those before."""
    lines = source.splitlines()
    for end in range(len(lines), max(0, len(lines) - 30), -1):
        try:
            return ast.parse("\n".join(lines[:end])).body
        except SyntaxError:
            continue
    return []


def _dotted(node: ast.expr) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def _uses(path: list[str], names: Mapping[str, object], roots: tuple[str, ...]) -> bool:
    value = names.get(path[0]) if path else None
    if isinstance(value, FunctionType) and is_of_user(value.__code__.co_filename):
        # what it names itself; functions that it calls are not looked into
        known = {name: each for name, each in value.__globals__.items() if not isinstance(each, FunctionType)}
        return any(_uses([name], known, roots) for name in value.__code__.co_names)
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(module, str) or not module.startswith(roots) or isinstance(value, str):
        return False
    full = ".".join([module, *path[1:]])
    return not full.startswith(_HARMLESS)
