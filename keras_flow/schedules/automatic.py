"""`auto`: the shortest schedule for given costs and a given memory, out of the published ones and those of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_flow.errors import FlowError
from keras_flow.schedules import search, tables
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
    best, shortest = None, float("inf")
    for rule in search.RULES:
        time, orders = search.play(places, microbatches, each, int(room * chunks), rule) or (float("inf"), None)
        if time < shortest - _ROUNDING:
            best, shortest = orders, time
        if shortest <= least + _ROUNDING:
            break
    if best is not None:
        yield Schedule(best, "auto")
