"""Is what a hook wraps what it was written against? Compared before hooks are put into versions that were not tested.

`fingerprints.json` has, for each name that is wrapped, or used although it is private, its signature and a hash of its
source, and the versions of its package with which the tests passed. `python -m keras_flow.backends.fingerprints` writes
what is installed into it: run it after `make test-versions` has passed there.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from keras_flow import settings
from keras_flow.backends import engines, selftest
from keras_flow.errors import FlowError, warn
from keras_flow.units import counted

if TYPE_CHECKING:
    from keras_flow.backends.hooking import Hook
    from keras_flow.current.keras_places import Private

    Place: TypeAlias = Hook | Private

#: the table
FILE = Path(__file__).parent.with_name("fingerprints.json")

#: fields of a syntax tree that say nothing of what it does
_NOT_SOURCE = ("annotation", "returns", "ctx", "kind", "type_comment")

#: name of an engine -> `place.name` -> fingerprint -> versions of its package that have it
Table = dict[str, dict[str, dict[str, list[str]]]]


def fingerprint(original: object) -> str:
    """The signature of a function, and a hash of what its source does: no types, comments or docstrings.

    Example:
        >>> def first(a, b=1):
        ...     return a + b
        >>> fingerprint(first).partition(" ")[0:2]
        ('(a,', ' ')
    """
    if inspect.ismodule(original):
        return "module"
    if not isinstance(original, property) and not callable(original):
        return f"{_UNREADABLE} compiled"  # to look into one of Keras's lazy modules would load it
    function: Any = original.fget if isinstance(original, property) else inspect.unwrap(original)  # type: ignore[arg-type]
    try:
        taken = inspect.signature(function)
        bare = [parameter.replace(annotation=parameter.empty) for parameter in taken.parameters.values()]
        signature = str(taken.replace(parameters=bare, return_annotation=taken.empty))
    except (TypeError, ValueError):
        signature = _UNREADABLE
    if inspect.isclass(original):
        return f"{signature} class"  # what of it is wrapped has fingerprints of its own
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


#: signature of a compiled function that does not tell it
_UNREADABLE = "(?)"


def of_places(places: Iterable[Place]) -> dict[str, str]:
    """`place.name` of hooks, and of what is used and not wrapped -> the fingerprint of what is installed.

    Raises:
        FlowError: a name is missing.
    """
    return {name_of(place): fingerprint(original_of(place)) for place in places if is_there(place)}


def name_of(place: Place) -> str:
    """The place and the name at it."""
    return f"{place.module}.{place.name}" if place.name else place.module


def is_public(name: str) -> bool:
    """Whether what `name_of` gives is a public name of Keras, whose meaning is documented.

    Example:
        >>> [is_public(name) for name in ("keras.Layer.__call__", "keras.Model._make_function", "keras:nn.conv")]
        [True, False, False]
    """
    last = name.rpartition(".")[2]
    return name.startswith("keras.") and (not last.startswith("_") or last.endswith("__"))


def original_of(place: Place) -> object:
    """Return the object at a place as its package defines it, without hooks.

    Raises:
        FlowError: its package does not have it.
    """
    from keras_flow.current import keras_places  # loads Keras

    try:
        if not place.name:
            return keras_places.find(place.module)
        owner, attribute = keras_places.owner(place.module, place.name), place.name.rpartition(".")[2]
        if inspect.isclass(owner) and place.module.startswith("keras"):
            owner = keras_places.writer(owner, attribute)
    except keras_places.MISSING as error:
        package = package_of(place.module)
        raise FlowError(
            f"keras_flow needs {name_of(place)}, which {package} {installed(package)} does not have. {advice(package)}"
        ) from error
    found = inspect.getattr_static(owner, attribute) if inspect.isclass(owner) else getattr(owner, attribute)
    found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    while hasattr(found, "keras_flow_hook"):
        found = found.__wrapped__
    return found


def is_there(place: Place) -> bool:
    """Whether a place is there; True where what is missing is an error, so that it is asked for and named."""
    if not settings.allows_untested():
        return True
    try:
        original_of(place)
    except FlowError:
        return False
    return True


def require_fitting(engine: str, asked: Sequence[Place]) -> None:
    """Check places against the versions that are installed, where these were not tested; before hooks are put in.

    A place that is missing, or has another signature, is an error. Where sources alone have changed a self-test
    decides, which is run once for these versions. A version that was tested before a place was wrapped has no record
    of it: the place is compared with those of other versions.

    Raises:
        FlowError: a place is not what keras_flow was written against, or the self-test failed.
    """
    from keras_flow.current import keras_places  # loads Keras

    is_ours = engine in _table()
    table = _table()[engine] if is_ours else _of_any_engine()
    found = {package: installed(package) for package in (("keras", engine) if is_ours else ("keras",))}
    new = [package for package, current in found.items() if current not in _tested(table, package)]
    places = [
        place
        for place in (*asked, *keras_places.privates())
        if (package := package_of(place.module)) in found and not _is_recorded(table, place, found[package])
    ]
    if not places and not new:
        return
    there = of_places(places)
    gone = [name_of(place) for place in places if not is_there(place)]
    changed = [name for name, seen in there.items() if seen not in table.get(name, {})]
    others = [name for name in changed if _is_called_otherwise(there[name], table.get(name, {}))]
    if not new and not gone and not changed:
        return
    packages = new or list(dict.fromkeys(package_of(place.module) for place in places))
    untested = " and ".join(f"{package} {found[package]}" for package in packages)
    asks = "`keras-flow doctor` runs a self-test, `dist.verify` checks a model of yours."
    if settings.allows_untested():
        names = ", ".join([*gone, *others, *(name for name in changed if name not in others)][:5])
        differ = f"{len(gone)} places are gone and {len(changed)} have changed ({names})" if names else "all places fit"
        warn(f"KERAS_FLOW_UNTESTED=allow: keras_flow was not tested with {untested}: {differ}. {asks}")
    elif others:
        raise FlowError(_misfit(others[0], len(others), there, table, found))
    elif changed:
        selftest.require(engine, untested, there, advice(packages[0]))
        warn(
            f"keras_flow was not tested with {untested}, where the source of {counted(len(changed), 'place')} that it "
            f"wraps or uses has changed ({', '.join(changed[:3])}); signatures are the same, and the self-test passed. "
            f"{asks}"
        )
    else:
        warn(
            f"keras_flow was not tested with {untested}; what it wraps or uses there is as in versions that it was "
            f"tested with. {asks}"
        )


def _is_recorded(table: Mapping[str, Mapping[str, list[str]]], place: Place, version: str) -> bool:
    return any(version in versions for versions in table.get(name_of(place), {}).values())


def _is_called_otherwise(fingerprint: str, known: Iterable[str]) -> bool:
    """Whether a place has a signature that none of the known ones is; the self-test judges one that cannot be read."""
    before = {_signature(each) for each in known}
    return _signature(fingerprint) not in {*before, _UNREADABLE} and _UNREADABLE not in before


def _signature(fingerprint: str) -> str:
    return fingerprint.rpartition(" ")[0]


def _misfit(
    name: str,
    count: int,
    there: Mapping[str, str],
    table: Mapping[str, Mapping[str, list[str]]],
    found: Mapping[str, Any],
) -> str:
    package = package_of(name)
    known = table.get(name, {})
    before = max((seen for seen in known), key=lambda seen: max(map(_ordered, known[seen])), default="")
    what = f"its signature was {_signature(before)} and is {_signature(there[name])}" if before else "it is new"
    others = f" ({count - 1} more places have changed, too)" if count > 1 else ""
    return (
        f"keras_flow needs {name}, which in {package} {found[package]} is not what it was written "
        f"against: {what}{others}. {advice(package)}"
    )


def package_of(module: str) -> str:
    """The engine, or keras, that a module belongs to."""
    top = re.split("[.:]", module)[0]
    return {"jaxlib": "jax", "jax": "jax"}.get(top, top)


def installed(package: str) -> str:
    """The version that is installed, without the part that names a build; empty where there is none."""
    return (engines.installed(package) or "").partition("+")[0]


def tested(package: str) -> list[str]:
    """The versions of Keras, or of an engine, that keras_flow was tested with, oldest first."""
    table = _table()[package] if package in _table() else _of_any_engine()
    return sorted(_tested(table, package), key=_ordered)


def advice(package: str) -> str:
    """Return the end of an error about a version that does not fit: what to do."""
    versions = ", ".join(tested(package)) or "in no version"
    return (
        f"It was tested with {package} {versions}: install one of these, or a newer keras_flow; "
        "KERAS_FLOW_UNTESTED=allow goes on at your own risk."
    )


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
        if package_of(name) == package
        for versions in known.values()
        for text in versions
    } | set(table.get(f"{package}:", {}).get("tested", []))


def _ordered(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _of_any_engine() -> dict[str, dict[str, list[str]]]:
    """The known fingerprints of Keras for an engine that the table does not have, since it is not one of ours."""
    known: dict[str, dict[str, list[str]]] = {}
    for of_engine in _table().values():
        for name, seen in of_engine.items():
            for text, versions in seen.items():
                known.setdefault(name, {}).setdefault(text, []).extend(versions)
    return known


@cache
def _table() -> Table:
    return json.loads(FILE.read_text(encoding="utf-8"))
