"""Calls that a loop makes again and again: what was checked and compared between the ranks once goes straight on.

A first call finds the members of its group, checks its op and asks whether all ranks make it. A later one with tensors
of the same dtype and shape, where no gradient is asked for, is one look into a table and the engine's own call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.collective_engine import LISTED, Pending
from keras_flow.backends.rendezvous import meeting
from keras_flow.comm.group import Group, count_call, dtype_name, forget_compared, processes_of
from keras_flow.comm.work import Work
from keras_flow.placements import Placement
from keras_flow.tensors.dtypes import numpy_dtype, standard_name

#: calls that go another way where their gradient is asked for; others have none
_DIFFERENTIABLE = frozenset(
    ["all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "reduce_scatter", "reduce_scatter_tensor"]
)

#: calls whose result depends on the order of the group, which functions of engines do not know: it is that of ranks
_BY_PLACE = LISTED | {"all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "scatter"}

#: entries of the table
_MOST = 1024

Run = Callable[[Any], Any]

#: (call, how, group, dtypes and shapes, async_op) -> the result of what this process gives (None where the engine has
#: no such function), and the processes that make the call; None: all
_table: dict[tuple[Any, ...], tuple[Run | None, tuple[int, ...] | None]] = {}
_UNKNOWN: tuple[Run | None, tuple[int, ...] | None] = (None, None)


def find(call: str, how: tuple[Any, ...], group: object, given: object, async_op: bool = False) -> Run | None:
    """Return the function that was kept when the same call was made before; None where it was not.

    Args:
        call: the name of the collective.
        how: its op, its source or target, and the ranks, shape and dtype where the caller tells them.
        group: the caller's group.
        given: what this rank gives: a tensor, a list of them, or None.
        async_op: whether the call returns a `Work`.
    """
    engine = tensor_engine()
    local = engine.world().local_ranks
    if len(local) != 1 or not (group is None or type(group) is Placement):
        return None
    if isinstance(given, (list, tuple)):
        facts: Any = tuple([engine.key_of(value, local[0]) for value in given])
        if None in facts:
            return None
    elif given is None:
        engine.is_recorded(())  # which TensorFlow refuses where it traces a program
        facts = None
    else:
        facts = engine.key_of(given, local[0])
        if facts is None:
            return None
    try:
        run, some = _table.get((call, how, group, facts, async_op), _UNKNOWN)
    except TypeError:  # what is told cannot be a key, so it was not told before
        return None
    if run is not None and some is None:
        meeting.enter(f"kf.comm.{call}", "", waits=True)
    elif run is not None:
        count_call(some)
    return run


def keep(
    call: str,
    how: tuple[Any, ...],
    group: Placement | None,
    members: Group,
    given: Mapping[int, Any],
    async_op: bool = False,
) -> Run | None:
    """Keep what makes the result of a call that was checked and compared, so that later calls find it.

    All ranks have compared the call. So a rank that does not find it makes it again without a message, and none waits.

    Returns:
        None where the call goes the whole way: the engine has no function for it, or its gradient is asked for.
    """
    engine = tensor_engine()
    world = engine.world()
    # all processes of a job go the same way, also those that drive one rank where others drive two
    if world.size > world.process_count or len(members.ranks) == 1:
        return None
    if call in _BY_PLACE and members.order != members.ranks:
        return None
    ((rank, value),) = given.items()
    values = value if isinstance(value, list) else [] if value is None else [value]
    is_recorded = engine.is_recorded(values)
    if is_recorded and call in _DIFFERENTIABLE and not async_op:
        return None
    facts: Any = tuple([(each.dtype, engine.shape(each)) for each in values])  # as `key_of` has them
    if not isinstance(value, list):
        facts = facts[0] if facts else None
    key = (call, how, group, facts, async_op)
    if key not in _table:
        if len(_table) == _MOST:
            del _table[next(iter(_table))]
        run, some = _made(call, how, members, rank, value, async_op), processes_of(members.ranks)
        if some is None and call in ("send", "recv"):
            some = tuple(range(world.process_count))  # not numbered: the other one calls it by another name
        _table[key] = run if run is None or some is None else _waiting(run, call, some), some
    run, _ = _table[key]
    if run is None or not (is_recorded and values):
        return run
    without = engine.without_gradient
    return lambda given: run([without(each) for each in given] if isinstance(given, list) else without(given))


def _waiting(run: Run, call: str, processes: tuple[int, ...]) -> Run:
    """Return `run`, during which other processes learn for whom this one waits."""

    def waits(given: Any) -> Any:
        with meeting.waiting_for(processes, f"kf.comm.{call}"):
            return run(given)

    return waits


def begin_anew() -> None:
    """Check and compare all calls again, after ranks were stopped in different places."""
    _table.clear()
    forget_compared()


def _made(call: str, how: tuple[Any, ...], members: Group, rank: int, given: Any, async_op: bool) -> Run | None:
    engine, like, is_mean = tensor_engine(), given, how[:1] == ("mean",)
    if is_mean and dtype_name(given[0] if isinstance(given, list) else given) == "float16":
        return None  # which is divided before it is added up
    if call == "barrier":
        like = engine.put(np.zeros(1, "int32"), rank)
    elif call in ("scatter", "recv"):
        how, (shape, dtype) = how[:1], how[1:]
        part = engine.put(np.zeros(shape, numpy_dtype(standard_name(dtype))), rank)
        like = [part] * len(members.ranks) if call == "scatter" else part
    run = engine.direct(call, members.ranks, like, ("sum", *how[1:]) if is_mean else how, async_op)
    if run is None or not (is_mean or async_op):
        return run

    def mean_of(total: Any) -> Any:
        if not is_mean or (call == "reduce" and rank != how[1]):
            return total
        with engine.on_rank(rank):
            return total / len(members.ranks)

    def begun(value: Any) -> Work:
        result = run(value)
        pending = result if isinstance(result, Pending) else Pending(lambda: {rank: result})
        return Work(pending, lambda results: mean_of(results[rank]))

    return begun if async_op else lambda value: mean_of(run(value))
