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

import pytest

from keras_flow.backends import fingerprints, hooking, keras_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.fingerprints import fingerprint
from keras_flow.errors import FlowError, FlowWarning
from tests import sampling

source_of = inspect.getsource

HOOKS = (*backend().hooks(), *keras_hooks.hooks())


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
        seen = fingerprints.of_hooks((*backend().hooks(), *keras_hooks.hooks()))
        return len(seen), [name for name, text in seen.items() if text not in table.get(name, {})]

    count, unknown = on_ranks(engine)(program)
    assert count > 30
    assert unknown == []


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
    with pytest.warns(FlowWarning, match=r"was not tested with keras 3\.99\.0; all \d+ places .*keras-flow doctor"):
        fingerprints.require_fitting("jax", HOOKS)


def test_a_hook_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fingerprints.installed
    monkeypatch.setattr(fingerprints, "installed", lambda name: "3.99.0" if name == "keras" else real(name))

    def fit(self, x=None, another=None):
        return None

    monkeypatch.setattr(
        hooking,
        "original_of",
        lambda hook, known=hooking.original_of: fit if hook.name == "Trainer.fit" else known(hook),
    )
    with pytest.raises(
        FlowError,
        match=r"wraps keras\.src\.models\.model\.Trainer\.fit, which in keras 3\.99\.0 is not what it was written "
        r"against: its signature was \(self, x=None, y=None.*\) and is \(self, x=None, another=None\)\. It was "
        r"tested with keras 3\.13\.2, 3\.14\.1, 3\.15",
    ):
        fingerprints.require_fitting("jax", HOOKS)


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


def beside_another_keras(engine: str, change: str = "") -> tuple[str, list[str]]:
    """The error of a program that makes distributions, and the warnings of keras_flow."""
    command = [sys.executable, "-c", PROGRAM.replace("CHANGE", change)]
    env = {**os.environ, "KERAS_BACKEND": engine}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    error, told = json.loads(done.stdout.splitlines()[-1])
    return error, told


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "tensorflow", "torch")))
def test_a_program_beside_an_untested_version_is_warned_once(engine: str) -> None:
    error, told = beside_another_keras(engine)
    assert error == ""
    assert len(told) == 1
    assert told[0].startswith("keras_flow was not tested with keras 3.99.0; all ")
    assert "`keras-flow doctor` runs a self-test" in told[0]


@pytest.mark.parametrize("engine", sampling.on_one(("jax", "tensorflow", "torch")))
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "from keras.src.models.model import Trainer; Trainer.fit = Trainer.predict",
            "keras_flow wraps keras.src.models.model.Trainer.fit, which in keras 3.99.0 is not what it was written "
            "against: its signature was (self, x=None, y=None, ",
        ),
        (
            "from keras.src.saving import saving_api; del saving_api.save_weights",
            "keras_flow wraps keras.src.saving.saving_api.save_weights, which keras 3.99.0 does not have. It was "
            "tested with keras 3.13.2, 3.14.1, 3.15.1: install one of these, or a newer keras_flow.",
        ),
    ],
    ids=("another signature", "a name that is gone"),
)
def test_a_program_beside_a_version_that_does_not_fit_gets_one_error(engine: str, change: str, expected: str) -> None:
    error, told = beside_another_keras(engine, change)
    assert error.startswith(expected)
    assert told == []


def test_a_module_that_is_not_there_is_named() -> None:
    hook = hooking.Hook("torch.no_such_module", "function", lambda *_: None, "for this test")
    with pytest.raises(
        FlowError,
        match=r"wraps torch\.no_such_module\.function, which torch .* does not have\. It was tested with torch 2\.13",
    ):
        fingerprints.of_hooks([hook])


def test_a_name_that_is_younger_than_the_oldest_version_is_left_out() -> None:
    hook = hooking.Hook("keras.src.ops.numpy", "no_such_thing", lambda *_: None, "for this test", since="keras 3.99")
    assert not hook.is_there
    assert fingerprints.of_hooks([hook]) == {}
