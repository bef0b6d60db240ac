"""The grid: every feature on every backend under dp4, tp4 and 2x2 gives the numbers of one device."""

from __future__ import annotations

import pytest

from tests.parity import faults, support
from tests.parity.cases import CASES

BACKENDS = ("tensorflow", "jax", "torch")
pytestmark = pytest.mark.timeout(1900)


@pytest.mark.parametrize(
    ("backend", "case", "layout"),
    [(backend, case.name, layout) for backend in BACKENDS for case in CASES.values() for layout in case.on(backend)],
)
def test_numbers_of_one_device(grids, backend, case, layout):
    result = grids[backend].result(case, layout)
    if result["status"] == "refused":
        reason = support.refused_reason(backend, case, layout)
        assert reason, f"refused, and docs/features.md does not say so: {result['error']}"
        assert reason in result["error"]
        return
    assert result["status"] == "ok", (
        result.get("over") or f"{result.get('error')} (one device: {result['single'] or 'fine'})"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_most_15_percent_are_not_native(grids, backend):
    cells = [cell for cell in support.cells(grids[backend].finish()) if cell.layout in support.LAYOUTS]
    other = [cell for cell in cells if cell.state != "native"]
    assert cells
    assert len(other) <= 0.15 * len(cells), f"{len(other)} of {len(cells)}: {other}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeded_faults_are_caught(grids, backend):
    results = [result for result in grids[backend].finish() if result["status"] == "fault"]
    caught = {(result["layout"], result["case"]): result["caught"] for result in results}
    missed = [fault for fault in faults.seeded(backend) if not caught.get(fault)]
    assert not missed, f"not caught: {missed}; found {caught}"
    unharmed = {layout: found for (layout, fault), found in caught.items() if fault == faults.NONE}
    assert unharmed == dict.fromkeys(faults.layouts(backend), False), results
