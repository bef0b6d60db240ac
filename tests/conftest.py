"""The engine of the tests that train in pytest's own process; other engines have processes of their own."""

import atexit
import os
import shutil
import tempfile

import pytest

os.environ["KERAS_BACKEND"] = "jax"
# Programs that several tests, or the processes that they start, compile alike are compiled once in a session.
_compiled = tempfile.mkdtemp(prefix="keras-flow-tests-")
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(scope="session")
def four_ranks() -> None:
    """Four virtual devices of JAX in pytest's own process; asked for by every test that uses the engine there, because
    only the first use can make them."""
    import keras_flow as kf

    assert kf.init(4).size == 4
