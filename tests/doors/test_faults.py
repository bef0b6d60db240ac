"""Faults that are put into the product are found by the doors: an averaged scale, a metric of one rank, a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doors import run, stage
from tests.ranks import Pool, RankError

PLAIN = stage.Setting("dp4", "in", "in", "yes", "uneven", "yes", "plain")


def opened(door: str, folder: str, patch: Callable[[pytest.MonkeyPatch], None]) -> dict[str, Any]:
    """Open a door on every rank while something is patched."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        return run.run([(door, PLAIN)], folder)[0]


def no_fault(patch: pytest.MonkeyPatch) -> None:
    """Change nothing."""


def averages_scales(patch: pytest.MonkeyPatch) -> None:
    """Believe every layer row by row, and look at no state: scales become means of the ranks' maxima."""
    from keras_flow.backends.row_wise import row_interaction
    from keras_flow.backends.torch import copies

    patch.setattr(row_interaction, "of_model", lambda model: None)
    patch.setattr(row_interaction, "of_layer", lambda layer, *more, **options: None)
    patch.setattr(copies, "compare_state", lambda model, placement: None)


def counts_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Add what the rows of rank 0 add to a metric, and nothing of the others."""
    from keras_flow.backends.torch import layouts
    from keras_flow.backends.torch.rows import partial_numbers

    original = partial_numbers.add_later
    share = 1.0 if layouts.this_rank() == 0 else 0.0
    patch.setattr(partial_numbers, "add_later", lambda variable, own, rows: original(variable, own * share, rows))


@pytest.mark.parametrize(
    ("door", "fault"), [("Layer.quantize, float8", averages_scales), ("Model.evaluate", counts_on_one_rank)]
)
def test_a_wrong_number_is_found(door: str, fault: Any, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    ranks = on_ranks("torch")
    right = ranks(opened, door, str(tmp_path / "right"), no_fault)
    assert right["status"] == "right", right
    wrong = ranks(opened, door, str(tmp_path / "wrong"), fault)
    assert wrong["status"] == "wrong", wrong


@pytest.mark.full
def test_a_door_that_hangs_is_found(tmp_path: Path) -> None:
    def open_it(folder: str) -> list[dict[str, Any]]:
        import keras_flow as kf
        from tests.doors.cases import CASES

        CASES["hangs"] = lambda s: [time.sleep(3600) for _ in range(kf.env.get_rank() % 2)]
        return run.run([("hangs", PLAIN)], folder)

    pool = Pool("torch", tmp_path / "pool", ranks=2)
    try:
        pool(int)  # started
        with pytest.raises(RankError, match=r"process 1: did not answer \(20 s at most\)"):
            pool(open_it, str(tmp_path), timeout=20.0)
    finally:
        pool.close()
