"""Published schedules: their times and what ranks hold, exactly; and torch's own orders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from keras_flow import schedules
from keras_flow.errors import FlowError
from keras_flow.schedules import Schedule

ROOT = Path(__file__).parents[2]
RANKS = range(1, 9)
MICROBATCHES = range(1, 17)
CHUNKS = (1, 2, 3)


def all_of(ranks: int, microbatches: int) -> Iterator[Schedule]:
    """Every published schedule."""
    yield schedules.gpipe(ranks, microbatches)
    yield schedules.one_f_one_b(ranks, microbatches)
    yield schedules.zbv(ranks, microbatches)
    for chunks in CHUNKS:
        yield schedules.interleaved(ranks, microbatches, chunks)
        yield schedules.zb1p(ranks, microbatches, chunks)


@pytest.mark.parametrize("ranks", RANKS)
def test_times_are_those_of_the_formulas(ranks: int) -> None:
    """With costs of 3, 4 and 5, and with equal ones where a formula asks for that."""
    costs = (3, 4, 5)
    for m in MICROBATCHES:
        for schedule in (schedules.gpipe(ranks, m), schedules.one_f_one_b(ranks, m)):
            assert schedule.makespan(costs) == (m + ranks - 1) * 12
        if m >= ranks:
            assert schedules.zb1p(ranks, m).makespan() == 3 * m + ranks - 1
        for chunks in CHUNKS:
            if m % ranks == 0:
                found = schedules.interleaved(ranks, m, chunks).makespan(costs)
                assert found == pytest.approx(float(12 * m + Fraction((ranks - 1) * 12, chunks)), abs=1e-9)
        if m >= 2 * ranks - 1:
            assert schedules.zbv(ranks, m).makespan() == 3 * m + (ranks - 1) / 2


@pytest.mark.parametrize("ranks", RANKS)
def test_what_ranks_hold(ranks: int) -> None:
    for m in MICROBATCHES:
        for rank in range(ranks):
            assert schedules.gpipe(ranks, m).peak(rank) == m
            assert schedules.one_f_one_b(ranks, m).peak(rank) == min(m, ranks - rank)
            assert schedules.zb1p(ranks, m).peak(rank) <= min(m, ranks)
            assert schedules.zbv(ranks, m).peak(rank) <= min(m, ranks)


def test_what_a_rank_holds_for_its_weights() -> None:
    """Between I and W the gradients by each layer's output stay: of as many micro-batches as W is late."""
    late = Schedule([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    assert (late.peak(0), late.peak(0, gradients=1.0)) == (2.0, 4.0)


#: torch's class and stages of a rank -> ours
OF_TORCH = {
    ("ScheduleInterleaved1F1B", 2): schedules.interleaved,
    ("ScheduleInterleavedZeroBubble", 1): lambda p, m: schedules.zb1p(p, m, 1),
    ("ScheduleInterleavedZeroBubble", 2): lambda p, m: schedules.zb1p(p, m, 2),
    ("ScheduleZBVZeroBubble", 2): schedules.zbv,
    ("ScheduleDualPipeV", 2): None,
}


def test_orders_of_torch() -> None:
    """Read from torch's CSV: the orders are ours, times those of the formulas; ours written are what torch reads."""
    cases = [(name, p, m, v) for name, v in OF_TORCH for p, m in ((2, 4), (4, 8), (4, 16), (8, 16))]
    said = subprocess.run(
        [sys.executable, "-m", "tests.schedules.torch_orders", *(":".join(map(str, case)) for case in cases)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    texts = said.strip("\n").split("\n\n\n")
    for (name, p, m, v), text, with_messages in zip(cases, texts[::2], texts[1::2], strict=True):
        read = schedules.from_csv(text + "\n")
        assert "UNSHARD" in with_messages and schedules.from_csv(with_messages + "\n").orders == read.orders
        ours = OF_TORCH[name, v]
        if ours is not None:
            assert read.orders == ours(p, m).orders, (name, p, m, v)
            assert (
                read.to_csv() == "\n".join(",".join(filter(None, row.split(","))) for row in text.splitlines()) + "\n"
            )
        expected = 3 * m + (3 if name == "ScheduleInterleaved1F1B" else 1) * (p - 1) / v
        assert read.makespan() == pytest.approx(expected, abs=1e-9), (name, p, m, v)


def test_a_schedule_comes_back_from_its_file(tmp_path: Path) -> None:
    made = schedules.zbv(3, 5)
    made.to_csv(tmp_path / "zbv.csv")
    assert schedules.from_csv(tmp_path / "zbv.csv").orders == made.orders
    with_messages = "\n".join(",".join(map(str, order)) for order in made.lowered()) + "\n"
    assert schedules.from_csv(with_messages).orders == made.orders
    assert schedules.from_csv("\n0F0,0B0\n1F0,1B0\n\n\n").ranks == 2
    with pytest.raises(FlowError, match=r"ranks \[1\] have none"):  # which is not left out, as if rank 2 were it
        schedules.from_csv("0F0,0B0\n\n1F0,1B0\n")


def test_pictures() -> None:
    drawing = schedules.zb1p(2, 3).draw()
    assert str(drawing).splitlines() == [
        "0 F0 F1 ·· I0 W0 F2 I1 W1 I2 W2",
        "1 ·· F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert drawing.svg.count("<rect") == 2 * 3 * 3 + 3
    assert "stage 1, micro-batch 2: backward by weights" in drawing.svg
    wide = str(schedules.zbv(4, 8).draw((1, 1.4, 0.6))).splitlines()
    assert len(wide) == 4 and len({len(line) for line in wide}) == 1


def test_a_message_takes_its_time() -> None:
    """One micro-batch through two ranks: F, a message, F, B, a message, B."""
    assert schedules.gpipe(2, 1).makespan((1, 2, 0), message=10) == 1 + 10 + 1 + 2 + 10 + 2
    # the ends of the V are on one rank
    assert schedules.zbv(1, 1).makespan((2, 2, 2), message=10) == 6


def test_stages_of_their_own_costs() -> None:
    schedule = schedules.gpipe(2, 2)
    assert schedule.makespan(([1, 3], 1, 1)) == 1 + 3 + 3 + 2 + 2 + 2
    assert schedule.bubble(([1, 3], 1, 1)) == pytest.approx(1 - 6 / 13)
