"""`auto`: at the bound where the memory allows it, and never worse than a published schedule that fits."""

from __future__ import annotations

import random

import pytest

from keras_flow import schedules
from keras_flow.errors import FlowError
from keras_flow.schedules import automatic
from tests import sampling
from tests.schedules.test_tables import all_of

COSTS = [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6), (1.0, 0.7, 1.3)]
_drawn = random.Random(5)
RANDOM = [tuple(round(_drawn.uniform(0.5, 1.5), 2) for _ in range(3)) for _ in range(50)]


def check(ranks: int, microbatches: int, costs: tuple[float, ...]) -> None:
    """With memory for 1.5 p micro-batches within 1.01 of the bound of two stages; with p not worse than any table."""
    wide = schedules.auto(ranks, microbatches, costs, memory=1.5 * ranks)
    assert max(map(wide.peak, range(ranks))) <= 1.5 * ranks
    assert wide.makespan(costs) <= 1.01 * schedules.bound(ranks, microbatches, costs, chunks=2)
    narrow = schedules.auto(ranks, microbatches, costs)
    assert max(map(narrow.peak, range(ranks))) <= ranks
    fitting = [one for one in all_of(ranks, microbatches) if max(map(one.peak, range(ranks))) <= ranks]
    assert narrow.makespan(costs) <= min(one.makespan(costs) for one in fitting) + 1e-9
    assert narrow.makespan(costs) >= schedules.bound(ranks, microbatches, costs, narrow.chunks) - 1e-9


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), pytest.param(8, 16, marks=sampling.one_in(3))])
@pytest.mark.parametrize("costs", COSTS)
def test_named_costs(ranks: int, microbatches: int, costs: tuple[float, ...]) -> None:
    check(ranks, microbatches, costs)


@pytest.mark.parametrize("costs", sampling.some(RANDOM, every=6))
def test_random_costs(costs: tuple[float, ...]) -> None:
    check(4, 8, costs)


def test_little_memory() -> None:
    """Less than 1f1b holds: a longer step, and an error where nothing fits."""
    small = schedules.auto(4, 8, memory=2)
    assert max(map(small.peak, range(4))) <= 2
    assert small.makespan() > schedules.one_f_one_b(4, 8).makespan()
    assert schedules.auto(2, 4, memory=float("inf")).makespan() == schedules.auto(2, 4, memory=4).makespan()
    with pytest.raises(FlowError, match=r"holds at most memory=0.5 micro-batches on each of 4 ranks; 1f1b holds 4"):
        schedules.auto(4, 8, memory=0.5)


def test_costs_by_stage_are_refused() -> None:
    with pytest.raises(FlowError, match="auto cuts into stages by itself: costs are three numbers"):
        schedules.auto(2, 4, ([1, 2], 1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("rooms", [[1, 1, 1], [3, 2, 1], [2, 4, 6], [6, 6, 6]])
def test_stages_that_are_cut_already(rooms: list[int]) -> None:
    """Each rank holds what it has room for, stages of unlike costs are never later than in a table that fits."""
    costs = [[2.0, 1.0, 4.0], [2.0, 1.0, 4.0], [1.0, 1.5, 4.0]]

    def fits(schedule: schedules.Schedule) -> bool:
        return all(schedule.peak(rank) <= room for rank, room in enumerate(rooms))

    made = automatic.on_places([0, 1, 2], 6, costs, rooms, fits)
    assert made is not None and fits(made) and list(made.rank_of.values()) == [0, 1, 2]
    tables = [one for one in (*all_of(3, 6), automatic.one_at_a_time([0, 1, 2], 6)) if one.stages == 3 and fits(one)]
    assert made.makespan(costs) <= min(one.makespan(costs) for one in tables)


def test_what_fits_decides_and_not_the_rooms() -> None:
    """Rooms are estimates: while what the search finds does not fit, ranks have less room."""
    costs = [[1.0] * 2] * 3
    made = automatic.on_places([0, 1], 4, costs, [4, 4], lambda schedule: schedule.peak(0) <= 1)
    assert made is not None and made.peak(0) == 1
    assert automatic.on_places([0, 1], 4, costs, [4, 4], lambda schedule: False) is None


def test_a_slow_message_makes_fewer_stages_better() -> None:
    assert schedules.auto(4, 4, message=0.0).chunks == 3
    assert schedules.auto(4, 4, message=5.0).chunks == 1
