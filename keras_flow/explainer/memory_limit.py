"""What `memory=` of a pipeline does: `schedule="auto"` keeps each rank below it, and a step that is above is refused.

The bytes are those that `explain` estimates. A rank that has twice the memory of what one micro-batch needs may hold
more of them at a time, so it waits less; in an order of `auto` each rank holds as many as it has room for.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.errors import FlowError
from keras_flow.explainer.explanation import Memory
from keras_flow.explainer.pipeline import StagesOfStep, memory_of, step_of
from keras_flow.pipelines import asked_schedule
from keras_flow.pipelines.staged_model import StagedModel
from keras_flow.schedules import Schedule
from keras_flow.schedules.automatic import on_places, one_at_a_time
from keras_flow.units import amount


def shortest_within(distribution: FlowDistribution, pipeline: StagedModel, batch_size: int, memory: int) -> Schedule:
    """Return the shortest order that is found of which no rank's estimated peak is above a limit.

    Stages and micro-batches are those of the pipeline; stages take as long as their multiplications are many.

    Args:
        distribution: it has laid the variables.
        pipeline: the model in stages.
        batch_size: rows of the batch.
        memory: bytes of a rank.

    Returns:
        One micro-batch at a time, which needs the least, where nothing is below the limit.
    """
    step, microbatches = step_of(distribution, pipeline, batch_size), pipeline.schedule.microbatches
    places = list(pipeline.schedule.rank_of.values())
    least = one_at_a_time(places, microbatches)
    if _most(step, least)[0] > memory:
        return least

    def fits(schedule: Schedule) -> bool:
        return _most(step, schedule)[0] <= memory

    costs = asked_schedule.costs(step.operations)
    return on_places(places, microbatches, costs, _rooms(step, least, memory), fits) or least


def refuse_memory(
    distribution: FlowDistribution,
    pipeline: StagedModel,
    batch_size: int,
    memory: int,
    with_microbatches: Callable[[int], Schedule | None],
) -> None:
    """Refuse a step whose estimated peak is above what a rank has.

    Args:
        distribution: it has laid the variables.
        pipeline: the model in stages.
        batch_size: rows of the batch.
        memory: bytes of a rank.
        with_microbatches: gives the schedule with so many micro-batches, or None.

    Raises:
        FlowError: saying what the rank needs, and what would fit.
    """

    def needs(remat: bool, schedule: Schedule) -> tuple[int, int, Memory]:
        changed = copy.copy(pipeline)
        changed.remat, changed.schedule = remat, schedule
        return _most(step_of(distribution, changed, batch_size), schedule)

    peak, rank, parts = needs(pipeline.remat, pipeline.schedule)
    if peak <= memory:
        return
    said = pipeline.schedule
    counts = [said.microbatches]
    while 2 * counts[-1] <= batch_size:
        counts.append(2 * counts[-1])
    advice = "No remat and no more micro-batches make it fit: take more stages, or a smaller batch_size"
    for count, remat in itertools.product(counts, (False, True)):
        schedule = said if count == said.microbatches else with_microbatches(count)
        if schedule is None or (pipeline.remat and not remat):
            continue
        found = needs(remat, schedule)[0]
        if found <= memory:
            ways = ['remat="stage"'] * (remat and not pipeline.remat) + [f"microbatches={count}"] * (
                schedule is not said
            )
            advice = f"With {' and '.join(ways)} it is {amount(found)}"
            break
    raise FlowError(
        f"memory={memory} ({amount(memory)}): rank {rank} needs about {amount(peak)} for a batch of {batch_size} rows "
        f"in {said.microbatches} micro-batches by {said.name} (weights {amount(parts.weights)}, "
        f"slots {amount(parts.slots)}, gradients {amount(parts.gradients)}, "
        f"activations {amount(parts.activations)}). {advice}"
    )


def _most(step: StagesOfStep, schedule: Schedule) -> tuple[int, int, Memory]:
    """The highest peak of a rank, which rank that is, and its memory by purpose."""
    found = memory_of(step, schedule)
    rank = max(found, key=lambda each: found[each].peak)
    return found[rank].peak, rank, found[rank]


def _rooms(step: StagesOfStep, least: Schedule, memory: int) -> list[int]:
    """How many micro-batches of a stage each rank may hold: those of `least`, and what the bytes left give."""
    found = memory_of(step, least)
    rooms = []
    for order in least.orders:
        own = sorted({action.stage for action in order})
        kept = max(step.held[stage].kept for stage in own)
        left = memory - max(found[rank].peak for stage in own for rank in step.stages[stage].all_ranks)
        more = left // kept if kept else least.microbatches * len(own)
        rooms.append(min(len(own) + more, least.microbatches * len(own)))
    return rooms
