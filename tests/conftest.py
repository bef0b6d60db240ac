"""The engine of the tests that train in pytest's own process; other engines have processes of their own."""

import atexit
import os
import shutil
import signal
import tempfile

import pytest

from tests.jobs import PARTS, Job

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: its jobs would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Backend -> its job, with the parts that the selected tests name as `PART`."""
    wanted = {getattr(item.module, "PART", "") for item in request.session.items}  # type: ignore[attr-defined]
    parts = {
        backend: [part for part, modules in PARTS.items() if part in wanted and backend in modules]
        for backend in dict.fromkeys(backend for modules in PARTS.values() for backend in modules)
    }
    return {backend: Job(backend, tmp_path_factory.mktemp(backend), own) for backend, own in parts.items()}
