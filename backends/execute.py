"""`kf.boxing.execute`: running a plan on the active engine.

It is not in `keras_flow/boxing/`, which knows no engine: plans are made, printed and simulated without one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.rendezvous import meeting
from keras_flow.boxing.simulate import check_shards
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.current import last_call
from keras_flow.errors import FlowError
from keras_flow.sbp import text


def execute(plan: BoxingPlan, shards: Mapping[int, object]) -> Mapping[int, object]:
    """Run a plan on the active Keras backend.

    Args:
        plan: made by `kf.boxing.plan`.
        shards: rank -> the engine's array of the source layout's local shape, for the ranks that this process drives
            (on torch its own rank; every rank of the world calls, those outside the plan with no shard).

    Returns:
        rank -> array of the target layout's local shape, for the ranks that this process drives.

    Raises:
        FlowError: a rank outside the world, a shard that is missing or has another shape, or dtype than the plan.
    """
    engine = tensor_engine()
    world = engine.world()
    # an engine would answer with an index error of its own, or wait for a rank that does not exist
    outside = [rank for rank in plan.ranks if rank >= world.size]
    if outside:
        raise FlowError(
            f"the boxing plan names ranks {outside}; the world has {world.size} ranks, 0 to {world.size - 1}"
        )
    if getattr(shards, "layout", None) != plan.source:  # an engine's own mapping knows what its shards are of
        here = [rank for rank in plan.source.placement.ranks if rank in world.local_ranks]
        check_shards(plan.source, shards, here)
        dtypes: list[Any] = [cast(Any, shards[rank]).dtype for rank in here]
        found = {getattr(dtype, "name", "") or str(dtype).rpartition(".")[2] for dtype in dtypes}
        # a rank that only receives would take the bytes for other numbers
        if found - {plan.dtype}:
            raise FlowError(f"the boxing plan is of {plan.dtype}, the shards are of {', '.join(sorted(found))}")
    if world.process_count > 1 and _needs_others(plan):
        meeting.meet(_in_words(plan), waits=True)
    else:
        last_call.enter(_in_words(plan))
    return engine.redistribute(plan, shards)


@functools.lru_cache(maxsize=1024)  # a loop runs few plans, each many times
def _needs_others(plan: BoxingPlan) -> bool:
    return plan.total_bytes > 0


@functools.lru_cache(maxsize=1024)
def _in_words(plan: BoxingPlan) -> str:
    before, after = plan.source, plan.target
    there = "" if after.placement == before.placement else f" -> {after.placement}"
    what = f"{list(before.shape)} {plan.dtype} on {before.placement}{there}"
    return f"boxing {text(before.nd_sbp)} -> {text(after.nd_sbp)} of {what}"
