"""Hooks are compared with what is installed: versions that were not tested are warned of, or refused by name."""

from __future__ import annotations

import warnings

import pytest

from keras_flow.backends import fingerprints, hooking, keras_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.fingerprints import fingerprint
from keras_flow.errors import FlowError, FlowWarning

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


def test_comments_and_docstrings_do_not_count_and_everything_else_does() -> None:
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

    second.__name__ = third.__name__ = fourth.__name__ = "first"
    texts = [fingerprint(function).replace("#", "") for function in (first, second, third, fourth)]
    assert [text.rpartition(" ")[0] for text in texts] == ["(a, b=1)"] * 3 + ["(a, b=2)"]
    assert fingerprint(len).endswith("compiled")


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


def test_a_name_that_is_younger_than_the_oldest_version_is_left_out() -> None:
    hook = hooking.Hook("keras.src.ops.numpy", "no_such_thing", lambda *_: None, "for this test", since="keras 3.99")
    assert not hook.is_there
    assert fingerprints.of_hooks([hook]) == {}
