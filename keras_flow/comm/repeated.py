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

#: (call, how, group, dtype, shape) -> the result of this process's tensor; None where the engine has no such function
_table: dict[tuple[Any, ...], Callable[[Any], Any] | None] = {}


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
    run = _table.get(_key(call, how, group, given))
    if run is None or engine.is_recorded([given]):
        return None
    last_call.enter(f"kf.comm.{call}")
    return run


def keep(call: str, how: str | int, group: Placement | None, members: Group, values: Values) -> None:
    """A call was checked and compared: where the engine has it as one function, later ones find it."""
    engine = tensor_engine()
    if len(engine.world().local_ranks) > 1 or len(members.ranks) == 1 or members.order != members.ranks:
        return
    ((rank, value),) = values.items()
    key = _key(call, how, group, value)
    if key in _table:  # calls that cannot take the short way come here each time
        return
    if how != "mean":
        _table[key] = engine.direct(call, members.ranks, value, how)
        return
    total = engine.direct(call, members.ranks, value, "sum")

    def mean(value: Any) -> Any:
        assert total is not None
        with engine.on_rank(rank):
            return total(value) / len(members.ranks)

    _table[key] = total and mean


def _key(call: str, how: object, group: object, value: Any) -> tuple[Any, ...]:
    return call, how, group, value.dtype, tensor_engine().shape(value)


def begin_anew() -> None:
    """Check and compare all calls again, after ranks were stopped in different places."""
    _table.clear()
    forget_compared()
