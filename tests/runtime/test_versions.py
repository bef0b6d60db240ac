"""Supported versions: one place says them, and others are refused."""

import tomllib
from pathlib import Path

import pytest

from keras_flow.backends.engines import ENGINES
from keras_flow.errors import FlowError
from keras_flow.runtime import versions


@pytest.fixture(autouse=True)
def _no_memory() -> None:
    versions.check.cache_clear()


def test_what_is_installed_is_supported() -> None:
    for engine in ("jax", "tensorflow", "torch"):
        versions.check(engine)


def test_older_keras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: "3.14.1" if name == "keras" else "0")
    with pytest.raises(FlowError, match=r"needs keras >=3\.15, found keras 3\.14\.1.*pip install"):
        versions.check("jax")


def test_newer_ones_are_left_to_the_check_of_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: "99.0")
    versions.check("jax")


def test_older_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "2.0.1+cu118" if name == "torch" else real(name))
    with pytest.raises(FlowError, match=r"needs torch >=2\.13, found torch 2\.0\.1\+cu118"):
        versions.check("torch")
    versions.check("jax")


def test_missing_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: "3.15.1" if name == "keras" else None)
    with pytest.raises(FlowError, match=r"found none; install it with `pip install 'keras-flow\[tensorflow\]'`"):
        versions.check("tensorflow")


def test_the_package_asks_for_the_same_ranges() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"keras{versions.SUPPORTED['keras']}" in project["dependencies"]
    for engine in ENGINES.values():
        extra = engine.extra.removeprefix("keras-flow").strip("[]")
        asked = project["optional-dependencies"][extra] if extra else project["dependencies"]
        assert any(f"{package}{engine.versions}" in asked for package in engine.packages), engine.name
