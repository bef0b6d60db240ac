"""The grid: every feature on every backend under dp4, tp4 and 2x2 gives the numbers of one device.

`make test` runs some models on every backend under one layout each, and a sixth of the other cases on one backend, all
by a hash of their names; `make test-full` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.parity import faults, support
from tests.parity.cases import CASES, plain
from tests.sampling import chosen, is_chosen

BACKENDS = ("tensorflow", "jax", "torch")
ON_EVERY_BACKEND = ("mlp", "cnn", "transformer", "odd batches")
#: of the other cases about one in so many is run
EVERY = 6


def _marks(is_run: bool) -> list[pytest.MarkDecorator]:
    return [] if is_run else [pytest.mark.full]


def _is_run(backend: str, name: str, layouts: tuple[str, ...], layout: str) -> bool:
    """Whether `make test` runs a case on a backend under a layout."""
    if chosen(f"{backend} {name}", layouts) != layout:
        return False
    return name in ON_EVERY_BACKEND or (is_chosen(name, EVERY) and chosen(f"backend of {name}", BACKENDS) == backend)


GRID = [
    pytest.param(backend, case.name, layout, marks=_marks(_is_run(backend, case.name, case.on(backend), layout)))
    for backend in BACKENDS
    for case in CASES.values()
    for layout in case.on(backend)
]
#: each on one of the backends; without a fault on all
FAULTS = [
    pytest.param(
        backend, layout, fault, marks=_marks(fault == faults.NONE or chosen(f"{layout} {fault}", BACKENDS) == backend)
    )
    for backend in BACKENDS
    for layout, fault in faults.seeded(backend)
]
#: each model of plain SGD on one of the backends
DOUBLED = [
    pytest.param(backend, case.name, marks=_marks(chosen(case.name, BACKENDS) == backend))
    for backend in BACKENDS
    for case in plain.CASES
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
