"""Hooks are compared with what is installed: versions that were not tested are warned of, or refused by name."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from keras_flow.backends import fingerprints, hooking, keras_hooks, object_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.fingerprints import fingerprint
from keras_flow.current import keras_places
from keras_flow.errors import FlowError, FlowWarning
from tests import sampling

source_of = inspect.getsource

HOOKS = (*backend().hooks(), *keras_hooks.hooks(), *object_hooks.declared())


def test_what_is_installed_was_tested() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fingerprints.require_fitting("jax", HOOKS)


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_every_engine_has_a_record_of_the_keras_it_is_tested_with(engine: str) -> None:
    tested = fingerprints._tested(fingerprints._table()[engine], "keras")
    assert "3.15.1" in tested


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_every_hook_has_a_fingerprint_that_is_what_is_installed(engine: str, on_ranks) -> None:
    """Where it fails: `python -m keras_flow.backends.fingerprints` under each engine, once the tests pass there."""

    def program() -> tuple[int, list[str]]:
        table = fingerprints._table()[backend().name]
        hooks = (*backend().hooks(), *keras_hooks.hooks(), *object_hooks.declared())
        seen = fingerprints.of_places((*hooks, *backend().privates(), *keras_places.privates()))
        return len(seen), [name for name, text in seen.items() if text not in table.get(name, {})]

    count, unknown = on_ranks(engine)(program)
    assert count > 30
    assert unknown == []


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_hooks_are_the_same_for_each_distribution(engine: str, on_ranks) -> None:
    """Otherwise each distribution would wrap Keras once more, until a program of many ends in a RecursionError."""

    def program() -> list[str]:
        first, second = [*backend().hooks(), *keras_hooks.hooks()], [*backend().hooks(), *keras_hooks.hooks()]
        return [one.name for one, other in zip(first, second, strict=True) if one.replacement != other.replacement]

    assert on_ranks(engine)(program) == []


def test_an_engine_of_others_is_held_against_what_is_known_of_keras() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fingerprints.require_fitting("numpy", keras_hooks.hooks())


def test_comments_docstrings_and_types_do_not_count_and_everything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(a, b=1):
        """One."""
        return a + b

    def second(a, b=1):
        # another comment
        return a + b

    def third(a, b=1):
        return a - b

    def fourth(a, b=2):
        return a + b

    def fifth(a: int, b: float = 1) -> float:
        return a + b

    functions = (first, second, third, fourth, fifth)
    as_first = {each: re.sub(r"def \w+", "def first", inspect.getsource(each)) for each in functions}
    monkeypatch.setattr(inspect, "getsource", lambda each: as_first[each] if each in as_first else source_of(each))
    one, *others = [fingerprint(function) for function in functions]
    assert one.startswith("(a, b=1) ")
    assert [other == one for other in others] == [True, False, False, True]
    assert fingerprint(len).endswith("compiled")


def test_every_python_makes_the_same_fingerprint() -> None:
    """Python 3.12's `ast.unparse` chooses other quotes for f-strings, and its functions have a field more."""
    (function,) = ast.parse("def f(a):\n    return f'{a!r:>8}'").body
    value = ("FormattedValue", ("value", ("Name", ("id", "a"))), ("conversion", ord("r")))
    form = ("format_spec", ("JoinedStr", ("values", (("Constant", ("value", ">8")),))))
    returned = ("Return", ("value", ("JoinedStr", ("values", ((*value, form),)))))
    arguments = ("arguments", ("args", (("arg", ("arg", "a")),)))
    assert fingerprints._structure(function) == (
        "FunctionDef",
        ("name", "f"),
        ("args", arguments),
        ("body", (returned,)),
    )


def test_an_untested_version_whose_hooks_fit_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fingerprints.installed
    monkeypatch.setattr(fingerprints, "installed", lambda name: "3.99.0" if name == "keras" else real(name))
    with pytest.warns(FlowWarning, match=r"was not tested with keras 3\.99\.0; what it wraps .*keras-flow doctor"):
        fingerprints.require_fitting("jax", HOOKS)


def test_a_place_that_a_tested_version_has_no_record_of_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "keras.callbacks.CSVLogger.on_epoch_end"
    known = fingerprints._table()["jax"]
    (seen,) = known[name]
    monkeypatch.setitem(known, name, {seen: ["3.14.0"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fingerprints.require_fitting("jax", HOOKS)
    monkeypatch.setitem(known, name, {"(self, batch) 1": ["3.14.0"]})
    with pytest.raises(FlowError, match=rf"needs {re.escape(name)}, .* its signature was \(self, batch\) and is "):
        fingerprints.require_fitting("jax", HOOKS)


def test_a_method_of_objects_that_keras_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fingerprints.installed
    monkeypatch.setattr(fingerprints, "installed", lambda name: "3.99.0" if name == "keras" else real(name))
    monkeypatch.delattr("keras.callbacks.OrbaxCheckpoint")
    with pytest.raises(FlowError, match=r"needs keras\.callbacks\.OrbaxCheckpoint\.\w+, which keras 3\.99\.0 does not"):
        fingerprints.require_fitting("jax", HOOKS)


def test_a_private_name_that_keras_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_places, "PRIVATE", [])
    with pytest.raises(FlowError, match=r"uses keras:nn\.not_there \(an example\).*KERAS_FLOW_UNTESTED=allow"):
        keras_places.private("keras:nn", "not_there", "an example")
    monkeypatch.setenv("KERAS_FLOW_UNTESTED", "allow")
    absent = keras_places.private("keras:nn", "not_there", "an example")
    for use in (lambda: absent(1), lambda: absent.name):
        with pytest.raises(FlowError, match=r"uses keras:nn\.not_there"):
            use()


def test_a_hook_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fingerprints.installed
    monkeypatch.setattr(fingerprints, "installed", lambda name: "3.99.0" if name == "keras" else real(name))

    def fit(self, x=None, another=None):
        return None

    monkeypatch.setattr(
        fingerprints,
        "original_of",
        lambda place, known=fingerprints.original_of: fit if place.name == "fit" else known(place),
    )
    with pytest.raises(
        FlowError,
        match=r"needs keras\.Model\.fit, which in keras 3\.99\.0 is not what it was written against: its signature "
        r"was \(self, x=None, y=None.*\) and is \(self, x=None, another=None\)\. It was tested with keras 3\.15\.1.*: "
        r"install one of these, or a newer keras_flow; KERAS_FLOW_UNTESTED=allow goes on at your own risk\.",
    ):
        fingerprints.require_fitting("jax", HOOKS)


@pytest.mark.parametrize(
    ("found", "known", "other"),
    [
        ("(a, b) 1", ["(a, b) 2"], False),
        ("(a, c) 1", ["(a, b) 2"], True),
        ("(*args, **kwargs) 1", ["(?) 2"], False),
        ("(?) 1", ["(a, b) 2"], False),
        ("(a) 1", [], True),
    ],
)
def test_a_signature_that_cannot_be_read_is_no_other_one(found: str, known: list[str], other: bool) -> None:
    """nanobind's functions tell theirs from JAX 0.12 on, and did not before."""
    assert fingerprints._is_called_otherwise(found, known) is other


#: makes distributions beside a Keras that is said to be of another version, changed by what is put in front
PROGRAM = """
import json, warnings
from keras_flow.backends import fingerprints
real = fingerprints.installed
fingerprints.installed = lambda name: "3.99.0" if name == "keras" else real(name)
error = ""
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import keras
    import keras_flow as kf
    from keras_flow.current import keras_places
    CHANGE
    try:
        for _ in range(2):
            with kf.DataParallel().scope():
                model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
                model.compile("sgd", "mse")
                model.fit(keras.ops.ones((4, 4)), keras.ops.ones((4, 4)), verbose=0)
    except kf.FlowError as raised:
        error = str(raised)
print(json.dumps([error, [str(w.message) for w in caught if issubclass(w.category, kf.FlowWarning)]]))
"""


def beside_another_keras(
    engine: str, change: str = "", settings: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, list[str]]:
    """The error of a program that makes distributions, and the warnings of keras_flow."""
    command = [sys.executable, "-c", PROGRAM.replace("CHANGE", change)]
    env = {**os.environ, "KERAS_BACKEND": engine, **settings}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    error, told = json.loads(done.stdout.splitlines()[-1])
    return error, told


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "tensorflow", "torch")))
def test_a_program_beside_an_untested_version_is_warned_once(engine: str) -> None:
    error, told = beside_another_keras(engine)
    assert error == ""
    assert len(told) == 1
    assert told[0].startswith("keras_flow was not tested with keras 3.99.0; what it wraps ")
    assert "`keras-flow doctor` runs a self-test" in told[0]


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "tensorflow", "torch")))
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "keras.Model.fit = keras.Model.predict",
            "keras_flow needs keras.Model.fit, which in keras 3.99.0 is not what it was written against: its "
            "signature was (self, x=None, y=None, ",
        ),
        (
            "del keras_places.find('keras:saving').save_weights",
            "keras_flow needs keras:saving.save_weights, which keras 3.99.0 does not have. It was tested with keras "
            "3.15.1",
        ),
    ],
    ids=("another signature", "a name that is gone"),
)
def test_a_program_beside_a_version_that_does_not_fit_gets_one_error(engine: str, change: str, expected: str) -> None:
    error, told = beside_another_keras(engine, change)
    assert error.startswith(expected)
    assert told == []


def test_a_package_that_is_missing_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = type(keras_places.find("keras:tensorflow"))
    monkeypatch.setattr(lazy, "__getattr__", lambda _, name: pytest.fail(f"{name} was asked of a lazy module"))
    places = [place for place in keras_places.privates() if place.module == "keras:tensorflow"]
    assert list(fingerprints.of_places(places).values()) == ["(?) compiled"]


def test_a_module_that_is_not_there_is_named() -> None:
    hook = hooking.Hook("torch.no_such_module", "function", lambda *_: None, "for this test")
    with pytest.raises(
        FlowError,
        match=r"needs torch\.no_such_module\.function, which torch .* does not have\. It was tested with torch 2\.13",
    ):
        fingerprints.of_places([hook])


@pytest.mark.full  # it trains: most of a minute
def test_source_that_changed_is_judged_by_a_self_test_that_runs_once(tmp_path: Path) -> None:
    """The signature of `Model.fit` stays; the second program finds what the first one found."""
    change = (
        "owner = keras_places.owner('keras.callbacks.TensorBoard', 'set_model')\n"
        "    owner.set_model = eval('lambda self, model: None')"
    )
    written = set()
    for _ in range(2):
        error, told = beside_another_keras("jax", change, {"XDG_CACHE_HOME": str(tmp_path)})
        assert error == ""
        assert len(told) == 1 and "the self-test passed" in told[0] and "TensorBoard.set_model" in told[0]
        written |= {(file.name, file.stat().st_mtime_ns) for file in tmp_path.rglob("selftest-jax-*.json")}
    assert len(written) == 1


def test_at_ones_own_risk_what_is_missing_is_left_out() -> None:
    change = "del keras.callbacks.TensorBoard.set_model"
    error, told = beside_another_keras("jax", change, {"KERAS_FLOW_UNTESTED": "allow"})
    assert error == ""
    assert len(told) == 1 and told[0].startswith("KERAS_FLOW_UNTESTED=allow: keras_flow was not tested with keras 3.99")


def test_a_nightly_build_is_found_where_it_is_imported_from(tmp_path: Path) -> None:
    """It is packaged as keras-nightly, and may stand in front of a release."""
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").touch()
    metadata = tmp_path / "keras_nightly-3.99.0.dev1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: keras-nightly\nVersion: 3.99.0.dev1")
    program = "from keras_flow.runtime import versions; print(versions.installed('keras'))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "3.99.0.dev1\n"


def test_what_is_installed_is_named_without_loading_it() -> None:
    """A launcher, and the ranks of tests, choose the engine after that."""
    program = "import sys; from keras_flow.backends import fingerprints; fingerprints.untested('torch'); "
    command = [sys.executable, "-c", program + "print({'keras', 'torch', 'jax'} & sys.modules.keys())"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
