"""Calls that a loop makes again and again: what was checked and compared between the ranks once goes straight on.

A first call finds the members of its group, checks its op and asks whether all ranks make it. A later one with a tensor
of the same dtype and shape, where no gradient is asked for, is one look into a table and the engine's own call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_flow.backends.active import tensor_engine
from keras_flow.comm.group import Group, Values, forget_compared
from keras_flow.current import last_call
from keras_flow.placements import Placement

#: (call, how, group, dtype, shape) -> the result of this process's tensor
_table: dict[tuple[Any, ...], Callable[[Any], Any]] = {}


def find(call: str, how: object, group: object, given: object) -> Callable[[Any], Any] | None:
    """What makes the result of this rank's tensor, where the same call was made before.

    Args:
        call: the name of the collective.
        how: its op, or its source.
        group: what the caller gave.
        given: the tensor.
    """
    engine = tensor_engine()
    local = engine.world().local_ranks
    is_known = (group is None or type(group) is Placement) and type(how) in (str, int)
    if not (is_known and len(local) == 1 and engine.is_array(given, local[0])):
        return None
    value: Any = given
    run = _table.get((call, how, group, value.dtype, engine.shape(value)))
    if run is None or engine.is_recorded([value]):
        return None
    last_call.enter(f"kf.comm.{call}")
    return run


def keep(call: str, how: str | int, group: Placement | None, members: Group, values: Values) -> None:
    """A call was checked and compared: where the engine has it as one function, later ones find it."""
    engine = tensor_engine()
    if len(engine.world().local_ranks) > 1 or len(members.ranks) == 1 or members.order != members.ranks:
        return
    ((rank, value),) = values.items()
    run = engine.direct(call, members.ranks, value, "sum" if how == "mean" else how)

    def mean(value: Any) -> Any:
        assert run is not None
        with engine.on_rank(rank):
            return run(value) / len(members.ranks)

    if run is not None:
        _table[(call, how, group, value.dtype, engine.shape(value))] = mean if how == "mean" else run


def begin_anew() -> None:
    """Check and compare all calls again, after ranks were stopped in different places."""
    _table.clear()
    forget_compared()
