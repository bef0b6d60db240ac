"""`all_reduce`, `reduce`, `reduce_scatter` and `reduce_scatter_tensor`."""

from __future__ import annotations

import math
from typing import Any

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.collective_engine import Counts
from keras_flow.comm import algorithms, repeated
from keras_flow.comm.group import (
    Group,
    Values,
    call_of,
    dtype_name,
    on_each,
    parts_of,
    require_same,
    reshaped,
    shape_of,
)
from keras_flow.comm.work import Work
from keras_flow.errors import FlowError
from keras_flow.placements import Placement


def all_reduce(x: object, op: str = "sum", group: Placement | None = None, async_op: bool = False) -> Any:
    """The sum (mean, smallest, largest, product) of a tensor over the ranks, on each of them.

    Its gradient for `"sum"` and `"mean"` is the same reduction of the ranks' cotangents.

    Args:
        x: this rank's tensor, of one shape and dtype on all; where a process drives several ranks rank -> tensor, as in
            all of `kf.comm`. It stays as it is.
        op: `"sum"`, `"mean"`, `"min"`, `"max"` or `"product"`. bool: `"sum"` and `"max"` are any, others all.
        group: the ranks that take part; all by default. Processes that have none of them need not call.
        async_op: return a `Work` at once, whose `wait()` gives the result. It has no gradient.

    Raises:
        FlowError: a rank calls something else, or gives another shape or dtype; the op is not one of the dtype.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.all_reduce({0: [1.0, 8.0], 1: [5.0, 2.0]}, op="max", group=kf.Placement([0, 1]))[1]
        Array([5., 8.], dtype=float32)
    """
    if run := repeated.find("all_reduce", (op,), group, x, async_op):
        return run(x)
    members = Group.of(group, "all_reduce")
    values = members.tensors(x, "all_reduce")
    if not values:
        return None
    check(members, values, op, "all_reduce")
    if run := repeated.keep("all_reduce", (op,), group, members, values, async_op):
        return run(*values.values())
    if async_op:
        return Work(algorithms.all_reduce(members, values, op), members.answer)
    pullback = algorithms.no_gradient(op, "all_reduce")
    if op in ("sum", "mean"):
        pullback = lambda cotangents: algorithms.all_reduce(members, cotangents, op)  # noqa: E731
    return members.answer(
        algorithms.differentiable(members, lambda given: algorithms.all_reduce(members, given, op), pullback, values)
    )


def reduce(x: object, dst: int, op: str = "sum", group: Placement | None = None) -> Any:
    """The sum (mean, ...) over the ranks, on rank `dst`; the others get their own tensor back.

    Raises:
        FlowError: as `all_reduce`; `dst` is not in the group.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.reduce({0: [1, 2], 1: [3, 4]}, dst=1, group=kf.Placement([0, 1]))
        {0: Array([1, 2], dtype=int32), 1: Array([4, 6], dtype=int32)}
    """
    if run := repeated.find("reduce", (op, dst), group, x):
        return run(x)
    members = Group.of(group, "reduce")
    members.check_member(dst, "reduce")
    values = members.tensors(x, "reduce")
    if not values:
        return None
    check(members, values, op, f"reduce to {dst}")
    if run := repeated.keep("reduce", (op, dst), group, members, values):
        return run(*values.values())
    engine = tensor_engine()
    shape, count = shape_of(next(iter(values.values()))), len(members.ranks)
    if 0 in shape or count == 1:
        return members.answer(values)
    parts = algorithms.balanced(math.prod(shape), count)
    flat = reshaped(values, (-1,))
    reduced = algorithms.reduce_scatter(members, flat, op, parts).results()
    place = members.ranks.index(dst)
    counts = [[size if to == place else 0 for to in range(count)] for size in parts]
    whole = tensor_engine().exchange(members.ranks, reduced, Counts.of(counts)).results()
    return members.answer(
        {**values, **on_each({dst: whole[dst]}, lambda value: engine.reshape(value, shape))} if dst in whole else values
    )


def reduce_scatter(x: object, op: str = "sum", group: Placement | None = None, async_op: bool = False) -> Any:
    """Each rank gives a tensor for every rank; each gets the sum (mean, ...) of those given for it.

    Its gradient for `"sum"` and `"mean"` is an all-gather.

    Args:
        x: a list with one tensor for each rank of the group, in its order; the k-th has one shape on all ranks.
        op: as in `all_reduce`.
        group: the ranks that take part.
        async_op: return a `Work` at once.

    Raises:
        FlowError: as `all_reduce`.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> pair = kf.Placement([0, 1])
        >>> kf.comm.reduce_scatter({0: [[1, 2], [3]], 1: [[10, 20], [30]]}, group=pair)
        {0: Array([11, 22], dtype=int32), 1: Array([33], dtype=int32)}
    """
    if run := repeated.find("reduce_scatter", (op,), group, x, async_op):
        return run(x)
    members = Group.of(group, "reduce_scatter")
    lists = members.lists(x, "reduce_scatter")
    if not lists:
        return None
    engine = tensor_engine()
    first = next(iter(lists.values()))
    algorithms.check_op(op, first[0], "reduce_scatter")
    require_same(
        members,
        {
            rank: f"reduce_scatter{members.order_in_words} {op} {dtype_name(tensors[0])}"
            f"{[list(shape_of(each)) for each in tensors]}"
            for rank, tensors in lists.items()
        },
    )
    if run := repeated.keep("reduce_scatter", (op,), group, members, lists, async_op):
        return run(*lists.values())
    shapes = [shape_of(each) for each in first]
    flat = on_each(lists, lambda tensors: engine.join([engine.reshape(each, (-1,)) for each in tensors]))
    return _scattered(members, flat, op, shapes, "reduce_scatter", async_op)


def reduce_scatter_tensor(x: object, op: str = "sum", group: Placement | None = None, async_op: bool = False) -> Any:
    """The sum (mean, ...) of a tensor over the ranks, of which each gets its part of dim 0.

    Its gradient for `"sum"` and `"mean"` is an all-gather.

    Args:
        x: this rank's tensor; dim 0 is a multiple of the group's size.
        op: as in `all_reduce`.
        group: the ranks that take part.
        async_op: return a `Work` at once.

    Raises:
        FlowError: as `all_reduce`; dim 0 does not divide (`reduce_scatter` takes parts of any size).

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> pair = kf.Placement([0, 1])
        >>> kf.comm.reduce_scatter_tensor({0: [1, 2, 3, 4], 1: [10, 20, 30, 40]}, group=pair)
        {0: Array([11, 22], dtype=int32), 1: Array([33, 44], dtype=int32)}
    """
    if run := repeated.find("reduce_scatter_tensor", (op,), group, x, async_op):
        return run(x)
    members = Group.of(group, "reduce_scatter_tensor")
    values = members.tensors(x, "reduce_scatter_tensor")
    if not values:
        return None
    shape, count = shape_of(next(iter(values.values()))), len(members.ranks)
    if not shape or shape[0] % count:
        raise FlowError(
            f"kf.comm.reduce_scatter_tensor: dim 0 of {list(shape)} must be a multiple of the {count} ranks; "
            "kf.comm.reduce_scatter takes a list of parts of any size"
        )
    check(members, values, op, f"reduce_scatter_tensor{members.order_in_words}")
    if run := repeated.keep("reduce_scatter_tensor", (op,), group, members, values, async_op):
        return run(*values.values())
    flat = reshaped(values, (-1,))
    part = (shape[0] // count, *shape[1:])
    if members.order != members.ranks:
        size = (math.prod(part),)
        flat = on_each(flat, lambda value: tensor_engine().join(members.by_rank(parts_of(value, [size] * count))))
    return _scattered(members, flat, op, [part] * count, "reduce_scatter_tensor", async_op)


def check(members: Group, values: dict[int, Any], op: str, call: str) -> None:
    """Check an op, and that all ranks give tensors of one shape and dtype."""
    algorithms.check_op(op, next(iter(values.values())), call.partition(" ")[0])
    require_same(members, {rank: call_of(f"{call} {op}", value) for rank, value in values.items()})


def _scattered(members: Group, flat: Values, op: str, shapes: list[tuple[int, ...]], call: str, async_op: bool) -> Any:
    """A reduce-scatter of flat tensors, whose parts get their shapes."""
    parts = [math.prod(shape) for shape in shapes]

    def finish(results: Any) -> Any:
        shaped = {}
        for rank, value in results.items():
            with tensor_engine().on_rank(rank):
                shaped[rank] = tensor_engine().reshape(value, shapes[members.ranks.index(rank)])
        return members.answer(shaped)

    if async_op:
        return Work(algorithms.reduce_scatter(members, flat, op, parts), finish)
    pullback = algorithms.no_gradient(op, call)
    if op in ("sum", "mean"):
        pullback = lambda cotangents: _spread(members, cotangents, op, parts)  # noqa: E731
    return finish(
        algorithms.differentiable(
            members, lambda given: algorithms.reduce_scatter(members, given, op, parts), pullback, flat
        )
    )


def _spread(members: Group, cotangents: Any, op: str, parts: list[int]) -> algorithms.Pending:
    """The gradient of a reduce-scatter."""
    count = len(members.ranks) if op == "mean" else 1
    return tensor_engine().gather_all(members.ranks, on_each(cotangents, lambda value: value / count), parts)
