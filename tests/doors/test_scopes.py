"""Scopes inside each other: the inner one holds, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doors import scopes
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")


@pytest.mark.parametrize("engine", ENGINES)
def test_ours_and_those_of_keras(engine: str, on_ranks: Callable[..., Pool]) -> None:
    def program() -> str:
        scopes.ours_in_ours()
        scopes.ours_in_keras()
        return scopes.keras_in_ours()

    text = on_ranks(engine)(program)
    assert text.startswith("model 'sequential") and "is used in the scope of keras.distribution.Stock" in text
    assert text.endswith("Leave that scope, or make the model inside it")


def test_strategies_of_tensorflow(on_ranks: Callable[..., Pool]) -> None:
    inside, of_a_model, around, in_mirrored = on_ranks("tensorflow")(scopes.strategies, timeout=120.0)
    for text in (inside, of_a_model, in_mirrored):
        assert text.startswith("the scope of MirroredStrategy of tf.distribute is entered inside that of DataParallel")
    assert "is entered inside that of MirroredStrategy of tf.distribute" in around
