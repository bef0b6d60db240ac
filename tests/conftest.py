"""The engine of the tests that train in pytest's own process; other engines have processes of their own."""

import os

import pytest

os.environ["KERAS_BACKEND"] = "jax"


@pytest.fixture(scope="session")
def four_ranks() -> None:
    """Four virtual devices of JAX in pytest's own process; asked for by every test that uses the engine there, because
    only the first use can make them."""
    import keras_flow as kf

    assert kf.init(4).size == 4
