"""The engine of the tests that train in pytest's own process, the ranks of all others, and which tests are run."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import sampling
from tests.ranks import Pool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: its ranks would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["KERAS_BACKEND"] = "jax"
# Generated cases are the same on every day and machine, as the tests are.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.load_profile("same")
# Programs that several tests, or the processes that they start, compile alike are compiled once in a session.
if "KERAS_FLOW_TESTS_COMPILED" not in os.environ:
    os.environ["KERAS_FLOW_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="keras-flow-tests-")
    atexit.register(shutil.rmtree, os.environ["KERAS_FLOW_TESTS_COMPILED"], ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["KERAS_FLOW_TESTS_COMPILED"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

#: what `make check` runs: no engine
_CHECK = (
    "algebra",
    "boxing",
    "distributions/test_rules.py",
    "test_docs.py",
    "test_layers_of_imports.py",
    "test_names.py",
)
#: parameters of a test that say which engine's ranks it asks for; else its module's `ENGINE` does
_ENGINE = ("backend", "engine")


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-randomly (`-p randomly`) to the order of tests: between a test's fixtures and the test it would draw
    seeds anew, over those that the fixtures have set."""
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make test-full` and `make test-changed`."""
    parser.addoption("--part", default="", help="of all tests, by the hashes of their names: 3/7 is the third of seven")
    parser.addoption("--budget", type=float, default=0.0, help="seconds after which no further test begins")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at markers, and pytest-xdist at groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs no engine, what is left to other runs, and group tests by the engine whose ranks they ask for,
    so that with pytest-xdist one worker starts them."""
    here = Path(__file__).parent
    if part := config.getoption("--part"):
        items[:] = [item for item in items if sampling.in_part(item, part)]
    for item in items:
        path = item.path.relative_to(here)
        if any(path.is_relative_to(part) for part in _CHECK):
            item.add_marker(pytest.mark.check)
        if not sampling.is_run(item):
            item.add_marker(pytest.mark.full)
        if "on_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(_engine(item)))
        elif "four_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("jax in pytest's own process"))


_begun = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what would begin after the budget; the report counts it as skipped."""
    budget = item.config.getoption("--budget")
    if budget and time.monotonic() - _begun > budget:
        pytest.skip(f"the budget of {budget:.0f} s is used up: `make test-changed BUDGET=0` runs all")


def _engine(item: pytest.Item) -> str:
    params = item.callspec.params if hasattr(item, "callspec") else {}  # type: ignore[attr-defined]
    named = [params[name] for name in _ENGINE if name in params] or [getattr(item.module, "ENGINE", "")]  # type: ignore[attr-defined]
    return str(named[0])


@pytest.fixture(scope="session")
def four_ranks() -> None:
    """Four virtual devices of JAX in pytest's own process; asked for by every test that uses the engine there, because
    only the first use can make them."""
    import keras_flow as kf

    assert kf.init(4).size == 4


@pytest.fixture(autouse=True)
def _engine_is_asked_for(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that initialises JAX here without `four_ranks`: a test after it would get one device."""
    yield
    bridge = sys.modules.get("jax._src.xla_bridge")  # private: jax has no public question that does not initialise it
    if "four_ranks" not in request.fixturenames and bridge is not None and bridge.backends_are_initialized():
        assert bridge.device_count() >= 4, "this test initialises JAX: it must ask for the fixture four_ranks"


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pool]]:
    """`on_ranks(backend)`: four ranks of an engine, started once, that run functions; see `tests/ranks.py`.

    `on_ranks(backend, environment)`: others, before whose start a module sets the environment.
    """
    pools: dict[tuple[str, str], Pool] = {}

    def of(backend: str, environment: str = "") -> Pool:
        key = (backend, environment)
        if key not in pools:
            pools[key] = Pool(backend, tmp_path_factory.mktemp(backend), environment=environment)
        return pools[key]

    yield of
    for pool in pools.values():
        pool.close()
