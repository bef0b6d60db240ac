"""The checkout as tools see it: editors and type checkers read files, and know nothing of an installed mapping."""

from __future__ import annotations

from pathlib import Path

import pytest

import keras_flow.backends.active

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.check


def test_an_editor_finds_the_backends_below_the_package() -> None:
    assert (ROOT / "keras_flow" / "backends").resolve() == ROOT / "backends"


def test_the_backends_of_the_checkout_are_imported() -> None:
    assert Path(keras_flow.backends.active.__file__).resolve() == ROOT / "backends" / "active.py"
