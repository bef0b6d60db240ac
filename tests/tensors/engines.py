"""Tests of global tensors as plain functions that run on the four ranks of an engine.

@on_engines
def test_sums() -> None: ...        # on numpy, and on one engine

@pytest.mark.parametrize("key", [0, 1])
@on_numpy
def test_rows(key: int) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.sampling import on_one

ENGINES = ("jax", "tensorflow", "torch")


def on_numpy(function: Callable[..., None]) -> Callable[..., None]:
    """What does not depend on the engine."""
    return _on(function, ["numpy"])


def on_engines(function: Callable[..., None]) -> Callable[..., None]:
    """On numpy and on one of the engines, by the test's name; on the others in `make test-full`."""
    return _on(function, ["numpy", *on_one(ENGINES)])


def on_every_engine(function: Callable[..., None]) -> Callable[..., None]:
    """On all of them."""
    return _on(function, ["numpy", *ENGINES])


def on_engines_alone(function: Callable[..., None]) -> Callable[..., None]:
    """What numpy has not: on one of the engines, by the test's name; on the others in `make test-full`."""
    return _on(function, on_one(ENGINES))


def on_jax(function: Callable[..., None]) -> Callable[..., None]:
    """What JAX alone has."""
    return _on(function, ["jax"])


def on_torch(function: Callable[..., None]) -> Callable[..., None]:
    """What torch alone has."""
    return _on(function, ["torch"])


def on_tensorflow(function: Callable[..., None]) -> Callable[..., None]:
    """What TensorFlow alone has."""
    return _on(function, ["tensorflow"])


def _on(function: Callable[..., None], backends: Sequence[Any]) -> Callable[..., None]:
    def test(backend: str, on_ranks: Callable[[str], Callable[..., Any]], **given: object) -> None:
        on_ranks(backend)(function, *given.values())

    own = inspect.signature(function).parameters.values()
    fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("backend", "on_ranks")]
    given = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    test.__signature__ = inspect.Signature([*fixtures, *given])  # type: ignore[attr-defined]
    test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
    return pytest.mark.parametrize("backend", backends)(test)
