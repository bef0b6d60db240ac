"""`auto`: the shortest schedule for given costs and a given memory, out of the published ones and those of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from keras_flow.errors import FlowError
from keras_flow.schedules import search, tables
from keras_flow.schedules.action import BACKWARD, FORWARD, Action
from keras_flow.schedules.schedule import Schedule
from keras_flow.schedules.tables import zbv
from keras_flow.schedules.timing import EQUAL, Costs

#: times within this of each other are equal
_ROUNDING = 1e-9


def bound(ranks: int, microbatches: int, costs: Sequence[float] = EQUAL, chunks: int = 1) -> float:
    """Return a time that no schedule of one step is below: m(F + I + W) + (p - 1)F / v.

    The rank that begins last waits for (p - 1)F / v, and has the work of m micro-batches before it.

    Args:
        ranks: p.
        microbatches: m.
        costs: F, I and W of one micro-batch on a rank.
        chunks: v, stages of a rank.

    Example:
        >>> bound(4, 8, (1, 1.4, 0.6), chunks=2)
        25.5
    """
    return microbatches * sum(costs) + (ranks - 1) * costs[0] / chunks


def auto(
    ranks: int,
    microbatches: int,
    costs: Sequence[float] = EQUAL,
    memory: float | None = None,
    chunks: int = 3,
    message: float = 0.0,
) -> Schedule:
    """Return the shortest schedule that is found for given costs and memory.

    Published schedules are at their best with F = I = W. Candidates are all of them that fit, and lists of a search.

    Args:
        ranks: how many.
        microbatches: into how many parts a batch is cut.
        costs: of F, I and W for one micro-batch on a rank, in any unit. Where a backward pass is not split, as on
            TensorFlow, (F, B, 0).
        memory: micro-batches whose activations a rank may hold; as many as there are ranks by default, as in 1F1B.
        chunks: the most stages that a rank may have.
        message: how long a message between ranks is on its way.

    Raises:
        FlowError: no schedule fits, or a number is not positive.

    Example:
        >>> best = auto(4, 8, costs=(1, 1.4, 0.6), memory=6)
        >>> round(best.makespan((1, 1.4, 0.6)), 1), round(zbv(4, 8).makespan((1, 1.4, 0.6)), 1)
        (25.4, 26.4)
    """
    room = ranks if memory is None else memory
    if any(isinstance(cost, Sequence) for cost in costs):
        raise FlowError("auto cuts into stages by itself: costs are three numbers, of F, I and W of a rank")
    best: Schedule | None = None
    shortest = float("inf")
    for schedule in _candidates(ranks, microbatches, costs, room, chunks, message):
        if max(map(schedule.peak, range(ranks))) > room + _ROUNDING:
            continue
        time = schedule.makespan(costs, message)
        if time < shortest - _ROUNDING:  # so of equal ones the first, which has the fewest stages
            best, shortest = schedule, time
    if best is None:
        raise FlowError(
            f"no schedule was found that holds at most memory={room:g} micro-batches on each of {ranks} ranks; 1f1b "
            f"holds {min(ranks, microbatches)}"
        )
    return best


def _candidates(
    ranks: int, microbatches: int, costs: Sequence[float], room: float, chunks: int, message: float
) -> Iterator[Schedule]:
    yield tables.one_f_one_b(ranks, microbatches)
    yield tables.gpipe(ranks, microbatches)
    for count in range(1, chunks + 1):
        yield tables.zb1p(ranks, microbatches, count)
        yield from _searched(list(range(ranks)) * count, microbatches, costs, room, message)
        if count == 2:
            yield zbv(ranks, microbatches)
            yield from _searched([*range(ranks), *reversed(range(ranks))], microbatches, costs, room, message)
        if count > 1:
            yield tables.interleaved(ranks, microbatches, count)


def _searched(
    places: list[int], microbatches: int, costs: Sequence[float], room: float, message: float
) -> Iterator[Schedule]:
    """Yield the shortest schedule by the rules of the search for one placement of the stages, where there is one."""
    ranks = max(places) + 1
    chunks = len(places) // ranks
    each = Costs.of(costs, len(places), chunks, message)
    least = bound(ranks, microbatches, costs, chunks)
    yield from _shortest(places, microbatches, each, [int(min(room, microbatches) * chunks)] * ranks, least)


def _shortest(
    places: Sequence[int], microbatches: int, costs: Costs, rooms: Sequence[int], least: float = 0.0
) -> Iterator[Schedule]:
    best, shortest = None, float("inf")
    for rule in search.RULES:
        time, orders = search.play(places, microbatches, costs, rooms, rule) or (float("inf"), None)
        if time < shortest - _ROUNDING:
            best, shortest = orders, time
        if shortest <= least + _ROUNDING:
            break
    if best is not None:
        yield Schedule(best, "auto")


def one_at_a_time(places: Sequence[int], microbatches: int) -> Schedule:
    """Return the order in which ranks hold the least: a micro-batch ends before the next begins.

    Args:
        places: each stage's rank, counted from 0.
        microbatches: into how many parts a batch is cut.

    Example:
        >>> one_at_a_time([0, 1], 2).draw()
        0 F0 ·· ·· ·· B0 B0 F1 ·· ·· ·· B1 B1
        1 ·· F0 B0 B0 ·· ·· ·· F1 B1 B1 ·· ··
    """
    orders: list[list[Action]] = [[] for _ in range(max(places) + 1)]
    stages = range(len(places))
    for part in range(microbatches):
        for kind, order in ((FORWARD, stages), (BACKWARD, stages[::-1])):
            for stage in order:
                orders[places[stage]].append(Action(stage, kind, part))
    return Schedule(orders, "auto")


def on_places(
    places: Sequence[int],
    microbatches: int,
    costs: Sequence[Sequence[float]],
    rooms: Sequence[int],
    fits: Callable[[Schedule], bool],
) -> Schedule | None:
    """Return the shortest schedule that is found for stages that are cut already; None where none fits.

    The search is first given the rooms, which may be estimates. While nothing that it finds fits, it has less.

    Args:
        places: each stage's rank, counted from 0.
        microbatches: into how many parts a batch is cut.
        costs: the costs of F, I and W, for each stage.
        rooms: chunks of micro-batches that each rank may hold.
        fits: whether ranks have the memory for a schedule.

    Example:
        >>> costs = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        >>> made = on_places([0, 1], 3, costs, [3, 1], lambda schedule: schedule.peak(1) <= 1)
        >>> made.draw() if made else None
        0 F0 F1 F2 I0 W0 ·· I1 W1 ·· I2 W2
        1 ·· F0 I0 W0 F1 I1 W1 F2 I2 W2 ··
    """
    ranks = len(rooms)
    each = Costs.of(costs, len(places), 1)
    found = [made for made in _published(ranks, microbatches, len(places) // ranks) if fits(made)]
    found = [made for made in found if list(made.rank_of.values()) == list(places)]
    for most in range(max(rooms), 0, -1):
        searched = _shortest(places, microbatches, each, [min(most, room) for room in rooms])
        fitting = [made for made in searched if fits(made)]
        if fitting:
            found += fitting
            break
    return min(found, key=lambda made: made.makespan(costs), default=None)


def _published(ranks: int, microbatches: int, chunks: int) -> Iterator[Schedule]:
    """Yield the published schedules with so many stages on each rank."""
    if chunks == 1:
        yield tables.one_f_one_b(ranks, microbatches)
        yield tables.gpipe(ranks, microbatches)
    yield tables.zb1p(ranks, microbatches, chunks)
    if chunks == 2:
        yield zbv(ranks, microbatches)
    if chunks > 1:
        yield tables.interleaved(ranks, microbatches, chunks)
