"""JAX in pytest's own process."""

import pytest


@pytest.fixture(autouse=True)
def stock_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests compare with stock Keras on one device, from its own initial weights."""
    monkeypatch.setenv("KERAS_FLOW_RANDOM", "stock")
