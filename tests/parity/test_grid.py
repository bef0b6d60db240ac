"""The grid: every feature on every backend under dp4, tp4 and 2x2 gives the numbers of one device."""

from __future__ import annotations

import pytest

from tests.parity import faults, support
from tests.parity.cases import CASES
from tests.parity.results import Grid

#: TensorFlow's grid takes longest: it runs beside the other two
BACKENDS = ("jax", "torch", "tensorflow")
pytestmark = pytest.mark.timeout(1900)


@pytest.fixture(scope="module")
def grids():
    """backend -> its grid, started when its first result is asked for; TensorFlow's at once."""
    running = {"tensorflow": Grid("tensorflow")}
    yield running
    for grid in running.values():
        grid.stop()


@pytest.mark.parametrize(
    ("backend", "case", "layout"),
    [(backend, case.name, layout) for backend in BACKENDS for case in CASES.values() for layout in case.layouts],
)
def test_numbers_of_one_device(grids, backend, case, layout):
    grid = grids.get(backend) or grids.setdefault(backend, Grid(backend))
    result = grid.result(case, layout)
    if result["status"] == "refused":
        reason = support.refused_reason(backend, case)
        assert reason, f"refused, and docs/support.md does not say so: {result['error']}"
        assert reason in result["error"]
        return
    assert result["status"] == "ok", (
        result.get("over") or f"{result.get('error')} (one device: {result['single'] or 'fine'})"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_most_15_percent_are_not_native(grids, backend):
    grid = grids.get(backend) or grids.setdefault(backend, Grid(backend))
    cells = support.cells(grid.finish())
    other = [cell for cell in cells if cell.state != "native"]
    assert len(other) <= 0.15 * len(cells), f"{len(other)} of {len(cells)}: {other}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeded_faults_are_caught(backend):
    grid = Grid(backend, "--faults")
    results = grid.finish()
    grid.stop()
    seeded = {(result["layout"], result["case"]): result["caught"] for result in results}
    missed = [fault for fault in faults.SEEDED if not seeded.get(fault)]
    assert not missed, f"not caught: {missed}; found {seeded}"
    assert not any(seeded[(layout, "no fault")] for layout in ("dp4", "tp4", "2x2")), results
