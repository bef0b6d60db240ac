"""Four virtual devices of JAX, driven by pytest's own process."""

import gc
from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(autouse=True)
def engine(four_ranks: None) -> None:
    """Every test here has the four ranks."""


@pytest.fixture(autouse=True)
def stock_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests compare with stock Keras on one device, from its own initial weights."""
    monkeypatch.setenv("KERAS_FLOW_RANDOM", "stock")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Names and seeds as at the start of a program, and no distribution left behind."""
    keras.utils.clear_session()
    gc.freeze()  # else every test searches what JAX keeps of the earlier ones for cycles, for seconds
    keras.utils.set_random_seed(7)
    yield
    assert keras.distribution.distribution() is None
