"""The grid: every feature on every backend under dp4, tp4 and 2x2 gives the numbers of one device.

Each day some models on every backend under one layout each, and a sixth of the other cases on one backend, so that a
case meets all backends and layouts within 54 days; all of them in `make test-full`.
"""

from __future__ import annotations

import pytest

from tests.parity import faults, support
from tests.parity.cases import CASES, plain
from tests.sampling import is_of_today, ordinal

BACKENDS = ("tensorflow", "jax", "torch")
EVERY_DAY = ("mlp", "cnn", "transformer", "odd batches")
#: each other case is run once in so many
DAYS = 6


def _today(row: int, number: int, name: str, layouts: tuple[str, ...], layout: str) -> bool:
    """Whether a case is run today on the backend of this row, under this layout."""
    if name in EVERY_DAY:
        return layouts[(row + number + ordinal()) % len(layouts)] == layout
    if not is_of_today(number, DAYS):
        return False
    turn, days = divmod(ordinal() // DAYS, len(BACKENDS))  # the layout changes once the case was on all backends
    return (number + days) % len(BACKENDS) == row and layouts[(row + number + turn) % len(layouts)] == layout


GRID = [
    pytest.param(
        backend,
        case.name,
        layout,
        marks=[] if _today(row, number, case.name, case.on(backend), layout) else pytest.mark.full,
    )
    for row, backend in enumerate(BACKENDS)
    for number, case in enumerate(CASES.values())
    for layout in case.on(backend)
]
#: each on one of the backends a day; without a fault on all
FAULTS = [
    pytest.param(
        backend,
        layout,
        fault,
        marks=[] if fault == faults.NONE or is_of_today(row + number, len(BACKENDS)) else pytest.mark.full,
    )
    for row, backend in enumerate(BACKENDS)
    for number, (layout, fault) in enumerate(faults.seeded(backend))
]
#: each model of plain SGD on one of the backends a day
DOUBLED = [
    pytest.param(backend, case.name, marks=[] if is_of_today(row + number, len(BACKENDS)) else pytest.mark.full)
    for row, backend in enumerate(BACKENDS)
    for number, case in enumerate(plain.CASES)
]


def run(name: str, layout: str) -> dict:
    """The result of a case under a layout."""
    import tempfile

    from tests.parity import worker  # its Keras is that of the ranks
    from tests.parity.cases import CASES

    if name not in worker.references:
        worker.references[name] = worker.Reference(CASES[name], tempfile.gettempdir())
    return worker.run_layout(worker.references[name], layout)


def over(name: str, layout: str, fault: str) -> list[str]:
    """What is over the tolerance with a fault."""
    import tempfile

    from tests.parity import faults

    return faults.seen(name, layout, fault, tempfile.gettempdir())


@pytest.mark.parametrize(("backend", "case", "layout"), GRID)
def test_numbers_of_one_device(on_ranks, backend: str, case: str, layout: str) -> None:
    result = on_ranks(backend)(run, case, layout)
    if result["status"] == "refused":
        reason = support.refused_reason(backend, case, layout)
        assert reason, f"refused, and docs/features.md does not say so: {result['error']}"
        assert reason in result["error"]
        return
    assert result["status"] == "ok", (
        result.get("over") or f"{result.get('error')} (one device: {result['single'] or 'fine'})"
    )


@pytest.mark.parametrize(("backend", "layout", "fault"), FAULTS)
def test_seeded_faults_are_caught(on_ranks, backend: str, layout: str, fault: str) -> None:
    assert bool(on_ranks(backend)(over, "", layout, fault)) is (fault != faults.NONE)


@pytest.mark.parametrize(("backend", "name"), DOUBLED)
def test_a_doubled_gradient_is_caught(on_ranks, backend: str, name: str) -> None:
    assert on_ranks(backend)(over, name, faults.DOUBLED_UNDER, plain.DOUBLED)
