"""Is what a hook wraps what it was written against? Compared before hooks are put into versions that were not tested.

`fingerprints.json` has, for each wrapped name, its signature and a hash of its source, and the versions of its package
with which the tests passed. `python -m keras_flow.backends.fingerprints` writes what is installed into it: run it
after `make test-versions` has passed there.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_flow.backends.engines import ENGINES
from keras_flow.errors import FlowError, warn

if TYPE_CHECKING:
    from keras_flow.backends.hooking import Hook

#: the table
FILE = Path(__file__).with_name("fingerprints.json")

#: fields of a syntax tree that say nothing of what it does
_NOT_SOURCE = ("annotation", "returns", "ctx", "kind", "type_comment")

#: name of an engine -> `module:name` -> fingerprint -> versions of its package that have it
Table = dict[str, dict[str, dict[str, list[str]]]]


def fingerprint(original: object) -> str:
    """The signature of a function, and a hash of what its source does: no types, comments or docstrings.

    Example:
        >>> def first(a, b=1):
        ...     return a + b
        >>> fingerprint(first).partition(" ")[0:2]
        ('(a,', ' ')
    """
    function: Any = original.fget if isinstance(original, property) else inspect.unwrap(original)  # type: ignore[arg-type]
    try:
        taken = inspect.signature(function)
        bare = [parameter.replace(annotation=parameter.empty) for parameter in taken.parameters.values()]
        signature = str(taken.replace(parameters=bare, return_annotation=taken.empty))
    except (TypeError, ValueError):
        signature = "(?)"  # of a compiled function
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return f"{signature} compiled"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    digest = hashlib.sha256(repr(_structure(tree)).encode()).hexdigest()[:12]
    return f"{signature} {digest}"


def _structure(node: object) -> object:
    """A syntax tree as nested tuples, the same in every version of Python.

    Without positions, which move with every line above, and without empty fields, of which versions of Python have
    more or fewer. (`ast.unparse` chooses quotes by the version, and `ast.dump` prints what it has.)
    """
    if isinstance(node, ast.AST):
        fields = ((name, _structure(value)) for name, value in ast.iter_fields(node) if name not in _NOT_SOURCE)
        return type(node).__name__, *((name, value) for name, value in fields if value not in (None, ()))
    return tuple(map(_structure, node)) if isinstance(node, list) else node


def of_hooks(hooks: Iterable[Hook]) -> dict[str, str]:
    """`module:name` of each wrapped name -> the fingerprint of what is installed.

    Raises:
        FlowError: a name is missing.
    """
    from keras_flow.backends.hooking import original_of

    return {f"{hook.module}:{hook.name}": fingerprint(original_of(hook)) for hook in hooks if hook.is_there}


def require_fitting(engine: str, hooks: Sequence[Hook]) -> None:
    """Check hooks against the versions that are installed, where these were not tested; called before they are put in.

    Raises:
        FlowError: what a hook wraps is not what it was written against.
    """
    is_ours = engine in _table()
    table = _table()[engine] if is_ours else _of_any_engine()
    found = {package: installed(package) for package in (("keras", engine) if is_ours else ("keras",))}
    new = [package for package, current in found.items() if current not in _tested(table, package)]
    if not new:
        return
    concerned = [hook for hook in hooks if package_of(hook.module) in new]
    there = of_hooks(concerned)
    misfits = [name for name, seen in there.items() if seen not in table.get(name, {})]
    untested = " and ".join(f"{package} {found[package]}" for package in new)
    if misfits:
        raise FlowError(_misfit(misfits[0], len(misfits), there, table, found))
    warn(
        f"keras_flow was not tested with {untested}; what it wraps there is as in versions that it was tested with. "
        "`keras-flow doctor` runs a self-test, `dist.verify` checks a model of yours."
    )


def _misfit(
    name: str,
    count: int,
    there: Mapping[str, str],
    table: Mapping[str, Mapping[str, list[str]]],
    found: Mapping[str, Any],
) -> str:
    module, _, function = name.partition(":")
    package = package_of(module)
    known = table.get(name, {})
    before = max((seen for seen in known), key=lambda seen: max(map(_ordered, known[seen])), default="")
    signature, old = there[name].rpartition(" ")[0], before.rpartition(" ")[0]
    what = f"its signature was {old} and is {signature}" if before and signature != old else "its source has changed"
    others = f" ({count - 1} more places have changed, too)" if count > 1 else ""
    return (
        f"keras_flow wraps {module}.{function}, which in {package} {found[package]} is not what it was written "
        f"against: {what}{others}. {advice(package)}"
    )


def package_of(module: str) -> str:
    """The engine, or keras, that a module belongs to."""
    top = module.partition(".")[0]
    return {"jaxlib": "jax", "jax": "jax"}.get(top, top)


def installed(package: str) -> str:
    """The version that is installed, without the part that names a build; empty where there is none."""
    for name in ENGINES[package].packages if package in ENGINES else (package,):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def tested(package: str) -> list[str]:
    """The versions of Keras, or of an engine, that keras_flow was tested with, oldest first."""
    table = _table()[package] if package in _table() else _of_any_engine()
    return sorted(_tested(table, package), key=_ordered)


def advice(package: str) -> str:
    """What to do where a version does not fit: the end of an error."""
    versions = ", ".join(tested(package)) or "in no version"
    return f"It was tested with {package} {versions}: install one of these, or a newer keras_flow."


def untested(engine: str) -> dict[str, str]:
    """Keras and the engine where they are installed in a version that was not tested: package -> version.

    Reads metadata alone: neither Keras nor the engine is loaded.
    """
    found = {package: installed(package) for package in ("keras", engine)}
    return {package: current for package, current in found.items() if current and current not in tested(package)}


def _tested(table: Mapping[str, Mapping[str, list[str]]], package: str) -> set[str]:
    """Versions of a package that the table has."""
    return {
        text
        for name, known in table.items()
        if package_of(name.partition(":")[0]) == package
        for versions in known.values()
        for text in versions
    } | set(table.get(f"{package}:", {}).get("tested", []))


def _ordered(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _of_any_engine() -> dict[str, dict[str, list[str]]]:
    """What is known of Keras, for an engine that the table does not have: it is not one of ours."""
    known: dict[str, dict[str, list[str]]] = {}
    for of_engine in _table().values():
        for name, seen in of_engine.items():
            for text, versions in seen.items():
                known.setdefault(name, {}).setdefault(text, []).extend(versions)
    return known


@cache
def _table() -> Table:
    return json.loads(FILE.read_text(encoding="utf-8"))


def write() -> None:
    """Write the fingerprints of the active engine's hooks, and of Keras's, for the versions that are installed."""
    from keras_flow.backends import keras_hooks
    from keras_flow.backends.active import backend

    engine = backend()
    table: Table = json.loads(FILE.read_text()) if FILE.exists() else {}
    of_engine = table.setdefault(engine.name, {})
    for name, seen in of_hooks((*engine.hooks(), *keras_hooks.hooks())).items():
        package = package_of(name.partition(":")[0])
        versions = of_engine.setdefault(name, {}).setdefault(seen, [])
        versions[:] = sorted({*versions, installed(package)}, key=_ordered)
    for package in ("keras", engine.name):  # also where no hook is in the engine itself
        tested = of_engine.setdefault(f"{package}:", {}).setdefault("tested", [])
        tested[:] = sorted({*tested, installed(package)}, key=_ordered)
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
