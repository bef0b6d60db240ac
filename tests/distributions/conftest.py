"""Four virtual devices of JAX, driven by pytest's own process."""

from collections.abc import Iterator

import keras
import pytest

import keras_flow as kf


@pytest.fixture(scope="session", autouse=True)
def four_ranks() -> None:
    """Before anything uses the engine."""
    assert kf.init(4).size == 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Names and seeds as at the start of a program, and no distribution left behind."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    yield
    assert keras.distribution.distribution() is None
