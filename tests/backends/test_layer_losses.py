"""A loss that a layer adds is its own, and is kept, wherever Python puts it in memory."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def _memory_given_out_again() -> Iterator[None]:
    """Inside, the `id` of a scope's first loss is that of the second one in the scope before, and so on."""
    import sys

    import keras

    from keras_flow.current.keras_places import get_stateless_scope

    module: Any = sys.modules[keras.Layer.__module__]
    scopes: list[Any] = []
    #: address of a loss, which is held -> it, and its `id`
    seen: dict[int, tuple[Any, int]] = {}
    added = 0

    def given_out_again(value: object) -> int:
        nonlocal added
        address = builtins.id(value)
        if address in seen:
            return seen[address][1]
        scope: Any = get_stateless_scope()
        if not any(value is loss for loss in (() if scope is None else scope.losses)):
            return address
        if not scopes or scope is not scopes[-1]:
            scopes.append(scope)
            added = 0
        seen[address] = value, len(scopes) + added
        added += 1
        return seen[address][1]

    module.id = given_out_again
    try:
        yield
    finally:
        del module.id


def _changed(ranks: int) -> list[str]:
    import keras_flow as kf
    from tests.pipelines import models

    distribution = kf.DataParallel(kf.Placement(range(ranks)), random="logical")
    expected = models.trained(distribution, "blocks")
    with _memory_given_out_again():
        found = models.trained(distribution, "blocks")
    return [key for key, value in expected.items() if models.distance(value, found[key]) > 1e-6]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_loss_where_another_was_in_the_step_before(ranks: int, on_ranks: Any) -> None:
    assert on_ranks("jax")(_changed, ranks) == []
