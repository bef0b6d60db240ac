"""`zero=`: the numbers of one device, whatever the optimizer, and slots that are split where the layout says so.

`make test` runs each case of the grid's small part, and each optimizer, under one layout on one backend.
"""

from __future__ import annotations

import pytest

from tests.parity import zero_program
from tests.parity.support import REFUSED, SMALL
from tests.parity.test_grid import run
from tests.sampling import chosen

BACKENDS = ("jax", "tensorflow", "torch")
LAYOUTS = ("dp4z1", "dp4z2", "dp4z3", "2x2z1", "2x2z2", "2x2z3")
CASES = [
    pytest.param(
        backend,
        name,
        layout,
        marks=[]
        if chosen(f"zero {name}", LAYOUTS) == layout and chosen(f"backend of {name}", BACKENDS) == backend
        else pytest.mark.full,
    )
    for backend in BACKENDS
    for name in SMALL
    for layout in LAYOUTS
    if (backend, name) not in REFUSED
]
#: layouts and rows of a batch: some that do not divide
TRANSFORMERS = (("dp3z3", 12), ("dp2x2z3", 12), ("2x2z3", 12), ("4x1z3", 12), ("dp2z3", 11), ("2x2z3", 11))
OPTIMIZERS = [
    pytest.param(
        backend,
        name,
        layout,
        marks=[]
        if chosen(f"optimizer {backend} {name}", zero_program.LAYOUTS) == layout
        and chosen(f"backend of {name}", BACKENDS) == backend
        else pytest.mark.full,
    )
    for backend in BACKENDS
    for name in zero_program.OPTIMIZERS
    if name != "plain"  # without slots
    for layout in zero_program.LAYOUTS
]


@pytest.mark.parametrize(("backend", "case", "layout"), CASES)
def test_cases_of_the_grid(on_ranks, backend: str, case: str, layout: str) -> None:
    result = on_ranks(backend)(run, case, layout)
    assert result["status"] == "ok", result.get("over") or result.get("error")


@pytest.mark.parametrize(("backend", "optimizer", "layout"), OPTIMIZERS)
def test_optimizers(on_ranks, backend: str, optimizer: str, layout: str) -> None:
    found = on_ranks(backend)(zero_program.deviations, optimizer, layout)
    assert {path: error for path, error in found["updates"].items() if error > 1e-4} == {}
    assert found["slots"] < 1e-4
    assert found["not as laid"] == []
    # Adafactor keeps rows and columns, of other shapes than the variable
    assert len(found["split"]) >= 2 or optimizer == "Adafactor"


@pytest.mark.parametrize(
    ("layout", "rows"),
    [("dp2z3", 12), *(pytest.param(*each, marks=pytest.mark.full) for each in TRANSFORMERS)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transformer(on_ranks, backend: str, layout: str, rows: int) -> None:
    found = on_ranks(backend)(zero_program.deviations, "plain", layout, 1.0, zero_program.TRANSFORMER, rows)
    assert {path: error for path, error in found["updates"].items() if error > 1e-4} == {}
    assert found["not as laid"] == []
    # two tables, two blocks of six kernels, and vectors; few dims divide by 3
    assert len(found["weights"]) >= (18 if layout != "dp3z3" else 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_over_the_inner_axis_of_two(on_ranks, backend: str) -> None:
    """Hybrid sharding: whole over the outer axis of the batch. TensorFlow computes rows twice, and says so."""
    found = on_ranks(backend)(zero_program.deviations_and_said, "momentum", "dp2x2z3i")
    assert max(found["updates"].values()) < 1e-4 and found["slots"] < 1e-4
    assert found["not as laid"] == [] and len(found["weights"]) >= 2
    said = [text for text in found["said"] if "rows are split over the largest" in text]
    assert len(said) == (backend == "tensorflow") and all("computed 2 times" in text for text in said)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_by_half_a_gradient_is_caught(on_ranks, backend: str) -> None:
    found = on_ranks(backend)(zero_program.deviations, "momentum", "dp4z2", 0.5)
    assert max(found["updates"].values()) > 0.1
