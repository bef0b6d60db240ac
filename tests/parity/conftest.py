"""The grid's workers start with the session, beside the other tests; the grid's own tests come last."""

from __future__ import annotations

import re

import pytest

from tests.parity.results import Grid, Schedule

#: in this order they start: TensorFlow's takes longest, torch's has four processes and fills what is left
_ORDER = ("tensorflow", "jax", "torch")
_SCHEDULE = pytest.StashKey[Schedule]()


def _is_of_grid(item: pytest.Item) -> bool:
    return item.path.name == "test_grid.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that only wait for a worker come after all that work themselves."""
    items.sort(key=_is_of_grid)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the workers that the selected tests of the grid need, for the cases that they need."""
    wanted: dict[str, set[str]] = {}
    for item in session.items:
        if _is_of_grid(item):
            params = item.callspec.params  # type: ignore[attr-defined]
            wanted.setdefault(params["backend"], set()).add(params.get("case", item.originalname))  # type: ignore[attr-defined]
    if wanted and not session.config.option.collectonly:
        grids = [Grid(backend, *_options(wanted[backend])) for backend in _ORDER if backend in wanted]
        session.config.stash[_SCHEDULE] = Schedule(grids)


def _options(wanted: set[str]) -> list[str]:
    faults = ["--faults"] if "test_seeded_faults_are_caught" in wanted else []
    if "test_at_most_15_percent_are_not_native" in wanted:
        return faults
    return [*faults, "--only", f"^({'|'.join(map(re.escape, sorted(wanted)))})$"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the workers, whatever happened."""
    schedule = session.config.stash.get(_SCHEDULE, None)
    if schedule is not None:
        schedule.stop()


@pytest.fixture(scope="session")
def grids(request: pytest.FixtureRequest) -> dict[str, Grid]:
    """backend -> its worker."""
    schedule = request.config.stash[_SCHEDULE]
    schedule.only_the_grid_is_left()
    return {grid.backend: grid for grid in schedule.grids}
