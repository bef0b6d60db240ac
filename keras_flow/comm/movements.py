"""`all_gather`, `all_gather_into_tensor`, `all_to_all`, `gather`, `scatter`, `broadcast` and `barrier`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.collective_engine import Counts, longest
from keras_flow.comm import algorithms, repeated
from keras_flow.comm.group import (
    Group,
    Values,
    call_of,
    dtype_name,
    empty,
    exchanged_shapes,
    note_compared,
    on_each,
    parts_of,
    require_same,
    reshaped,
    shape_of,
    shapes_of_all,
)
from keras_flow.comm.work import Work
from keras_flow.errors import FlowError
from keras_flow.placements import Placement
from keras_flow.tensors.dtypes import standard_name

Shape = tuple[int, ...]
Shaped = Callable[[Values], Values]


def all_gather(x: object, group: Placement | None = None, async_op: bool = False, same_shape: bool = False) -> Any:
    """The tensors of all ranks, on each: a list in the group's order. Shapes may differ.

    Its gradient sums over the ranks what each has for this rank's tensor.

    Args:
        x: this rank's tensor, of one dtype on all.
        group: the ranks that take part.
        async_op: return a `Work` at once.
        same_shape: all tensors have one shape, as the engines' own calls want it. Otherwise each call asks for shapes,
            which takes a message more.

    Raises:
        FlowError: a rank calls something else, or has another dtype; or shape, where that is the same.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.all_gather({0: [1, 2], 1: [3]}, group=kf.Placement([0, 1]))[1]
        [Array([1, 2], dtype=int32), Array([3], dtype=int32)]
    """
    if same_shape and (run := repeated.find("all_gather", (), group, x, async_op)):
        return run(x)
    members = Group.of(group, "all_gather")
    values = members.tensors(x, "all_gather")
    if not values:
        return None
    shapes = _shapes(members, values, "all_gather", same_shape)
    if len(set(shapes)) == 1 and (run := repeated.keep("all_gather", (), group, members, values, async_op)):
        return run(*values.values())

    def cut(values: Values) -> Values:
        return on_each(values, lambda value: members.in_order(parts_of(value, shapes)))

    return _gathered(members, values, shapes, async_op, cut)


def all_gather_into_tensor(x: object, group: Placement | None = None, async_op: bool = False) -> Any:
    """The tensors of all ranks, joined along dim 0, on each; scalars become a vector.

    Its gradient is a reduce-scatter.

    Args:
        x: this rank's tensor, of one shape and dtype on all (`all_gather` takes others).
        group: the ranks that take part.
        async_op: return a `Work` at once.

    Raises:
        FlowError: a rank calls something else, or has another shape or dtype.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.all_gather_into_tensor({0: [1, 2], 1: [3, 4]}, group=kf.Placement([0, 1]))[0]
        Array([1, 2, 3, 4], dtype=int32)
    """
    if run := repeated.find("all_gather_into_tensor", (), group, x, async_op):
        return run(x)
    members = Group.of(group, "all_gather_into_tensor")
    values = members.tensors(x, "all_gather_into_tensor")
    if not values:
        return None
    _check_equal(members, values, f"all_gather_into_tensor{members.order_in_words}")
    if run := repeated.keep("all_gather_into_tensor", (), group, members, values, async_op):
        return run(*values.values())
    shape, count = shape_of(next(iter(values.values()))), len(members.ranks)
    joined = (count * shape[0], *shape[1:]) if shape else (count,)

    def shaped(values: Values) -> Values:
        if members.order != members.ranks:
            parts = [(math.prod(shape),)] * count
            values = on_each(values, lambda value: tensor_engine().join(members.in_order(parts_of(value, parts))))
        return reshaped(values, joined)

    return _gathered(members, values, [shape] * count, async_op, shaped)


def all_to_all(x: object, group: Placement | None = None, async_op: bool = False, same_shape: bool = False) -> Any:
    """Each rank gives a tensor for every rank, and gets those that all gave for it, in the group's order.

    Its gradient sends cotangents back.

    Args:
        x: a list with one tensor for each rank of the group, of any shapes and one dtype.
        group: the ranks that take part.
        async_op: return a `Work` at once.
        same_shape: all tensors of all ranks have one shape, as the engines' own calls want it. Otherwise each call asks
            for shapes, which takes two messages more.

    Raises:
        FlowError: a rank calls something else, or has another dtype; or shape, where that is the same.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.all_to_all({0: [[1], [2, 3]], 1: [[4, 5], []]}, group=kf.Placement([0, 1]))[0]
        [Array([1], dtype=int32), Array([4, 5], dtype=int32)]
    """
    if same_shape and (run := repeated.find("all_to_all", (), group, x, async_op)):
        return run(x)
    members = Group.of(group, "all_to_all")
    lists = members.lists(x, "all_to_all")
    if not lists:
        return None
    engine, count = tensor_engine(), len(members.ranks)
    sent = {rank: [shape_of(each) for each in tensors] for rank, tensors in lists.items()}
    if same_shape:
        words = f"all_to_all{members.order_in_words} of same_shape"
        uneven = {rank: f"{words}: {shapes}" for rank, shapes in sent.items() if len(set(shapes)) > 1}
        # those that are wrong are compared, too, so that no rank waits for them
        require_same(members, {rank: uneven.get(rank, call_of(words, row[0])) for rank, row in lists.items()})
        if uneven:
            raise FlowError(f"kf.comm: rank {min(uneven)} calls {uneven[min(uneven)]}, which differ")
        if run := repeated.keep("all_to_all", (), group, members, lists, async_op):
            return run(*lists.values())
        received = sent
        counts = Counts.of([[math.prod(next(iter(sent.values()))[0])] * count] * count)
    else:
        words = f"all_to_all{members.order_in_words}"
        require_same(members, {rank: f"{words} {dtype_name(row[0])}" for rank, row in lists.items()})
        received = exchanged_shapes(members, sent)
        counts = _counts(members, sent, received)
    flat = on_each(lists, lambda tensors: engine.join([engine.reshape(each, (-1,)) for each in tensors]))

    def finish(results: Mapping[int, Any]) -> Any:
        found = {}
        for rank, value in results.items():
            with engine.on_rank(rank):
                found[rank] = members.in_order(parts_of(value, received[rank]))
        return members.answer(found)

    if async_op:
        return Work(tensor_engine().exchange(members.ranks, flat, counts), finish)
    return finish(
        algorithms.differentiable(
            members,
            lambda given: tensor_engine().exchange(members.ranks, given, counts),
            lambda cotangents: tensor_engine().exchange(members.ranks, cotangents, counts.transposed()),
            flat,
        )
    )


def gather(x: object, dst: int, group: Placement | None = None, same_shape: bool = False) -> Any:
    """The tensors of all ranks, on rank `dst`: a list in the group's order. The others get None. Shapes may differ.

    Args:
        x: this rank's tensor, of one dtype on all.
        dst: the rank that gets them.
        group: the ranks that take part.
        same_shape: all tensors have one shape, as the engines' own calls want it. Otherwise each call asks for shapes,
            which takes a message more.

    Raises:
        FlowError: a rank calls something else, or has another dtype; or shape, where that is the same. `dst` is not in
            the group.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.gather({0: [1, 2], 1: [3]}, dst=1, group=kf.Placement([0, 1]))
        {0: None, 1: [Array([1, 2], dtype=int32), Array([3], dtype=int32)]}
    """
    if same_shape and (run := repeated.find("gather", (dst,), group, x)):
        return run(x)
    members = Group.of(group, "gather")
    members.check_member(dst, "gather")
    values = members.tensors(x, "gather")
    if not values:
        return None
    shapes = _shapes(members, values, f"gather to {dst}", same_shape)
    if len(set(shapes)) == 1 and (run := repeated.keep("gather", (dst,), group, members, values)):
        return run(*values.values())
    place = members.ranks.index(dst)
    counts = [[math.prod(shape) if to == place else 0 for to in range(len(shapes))] for shape in shapes]
    flat = reshaped(values, (-1,))
    got = tensor_engine().exchange(members.ranks, flat, Counts.of(counts)).results()
    found = on_each(
        {rank: value for rank, value in got.items() if rank == dst},
        lambda value: members.in_order(parts_of(value, shapes)),
    )
    return members.answer({rank: found.get(rank) for rank in values})


def scatter(
    x: object, src: int, group: Placement | None = None, shape: Shape | None = None, dtype: str | None = None
) -> Any:
    """Each rank gets its tensor of the list that rank `src` gives.

    Args:
        x: on rank `src` a list with one tensor for each rank of the group, of any shapes and one dtype; elsewhere None.
        src: the rank that gives.
        group: the ranks that take part.
        shape: that of each tensor, where all ranks know it and it is one; else None, and `src` tells the others.
        dtype: their dtype; named exactly when `shape` is.

    Raises:
        FlowError: a rank calls something else; `src` is not in the group, gives no list, or other tensors than it was
            said; one of shape and dtype is missing.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.scatter({0: [[1, 2], [3]], 1: None}, src=0, group=kf.Placement([0, 1]))
        {0: Array([1, 2], dtype=int32), 1: Array([3], dtype=int32)}
    """
    if (shape is None) != (dtype is None):
        raise FlowError("kf.comm.scatter takes shape and dtype, or neither: then the rank that gives tells them")
    shape = None if shape is None else tuple(shape)
    engine, how = tensor_engine(), (src, shape, dtype)
    own = x if src in engine.world().local_ranks else None  # of the others nothing counts
    if dtype is not None and (run := repeated.find("scatter", how, group, own)):
        return run(own)
    members = Group.of(group, "scatter")
    members.check_member(src, "scatter")
    given = members.of_ranks(x, "scatter")
    if not given:
        return None
    count, place = len(members.ranks), members.ranks.index(src)
    lists = {src: given[src]} if src in given else {}
    if src in given:
        lists = Group(members.ranks, (src,), members.order).lists({src: given[src]}, "scatter")
    if shape is not None and dtype is not None:
        name, shapes = standard_name(dtype), [shape] * count
        words = f"scatter from {src}{members.order_in_words} of "
        said = dict.fromkeys(given, f"{words}{name}{list(shape)}")
        if lists:  # what they have, so that all ranks are told when it is something else
            found = dict.fromkeys(f"{dtype_name(each)}{list(shape_of(each))}" for each in lists[src])
            said[src] = words + ", ".join(found)
        require_same(members, said)
        if run := repeated.keep("scatter", how, group, members, {rank: lists.get(rank) for rank in given}):
            return run(lists.get(src))
    else:
        require_same(members, dict.fromkeys(given, f"scatter from {src}{members.order_in_words}"))
        # what it gives is known to `src` alone: first the dtype and all shapes, then the tensors
        facts = [dtype_name(lists[src][0]), [shape_of(each) for each in lists[src]]] if lists else None
        name, shapes = algorithms.broadcast_text(members, facts, src)
    sizes = [math.prod(each) for each in shapes]
    flat = {}
    for rank in given:
        with engine.on_rank(rank):
            tensors = [engine.reshape(each, (-1,)) for each in lists.get(rank, [])]
            flat[rank] = engine.join(tensors) if tensors else empty(name, rank)
    counts = Counts.of([sizes if sender == place else [0] * count for sender in range(count)])
    got = engine.exchange(members.ranks, flat, counts).results()
    return members.answer(
        {rank: engine.reshape(value, tuple(shapes[members.ranks.index(rank)])) for rank, value in got.items()}
    )


def broadcast(x: object, src: int, group: Placement | None = None, async_op: bool = False) -> Any:
    """The tensor of rank `src`, on all ranks.

    Args:
        x: this rank's tensor; of one shape and dtype on all, since those of the others say what to expect.
        src: the rank whose value it is.
        group: the ranks that take part.
        async_op: return a `Work` at once.

    Raises:
        FlowError: a rank calls something else, or has another shape or dtype; `src` is not in the group.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.broadcast({0: [1, 2], 1: [3, 4]}, src=1, group=kf.Placement([0, 1]))[0]
        Array([3, 4], dtype=int32)
    """
    if run := repeated.find("broadcast", (src,), group, x, async_op):
        return run(x)
    members = Group.of(group, "broadcast")
    members.check_member(src, "broadcast")
    values = members.tensors(x, "broadcast")
    if not values:
        return None
    _check_equal(members, values, f"broadcast from {src}")
    if run := repeated.keep("broadcast", (src,), group, members, values, async_op):
        return run(*values.values())
    work = Work(algorithms.broadcast(members, values, src), members.answer)
    return work if async_op else work.wait()


def barrier(group: Placement | None = None) -> None:
    """Wait until every rank of the group is here.

    Raises:
        FlowError: a rank calls something else.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.barrier()
    """
    if run := repeated.find("barrier", (), group, None):
        run(None)
        return
    members = Group.of(group, "barrier")
    if members.is_local or not members.mine:
        return
    require_same(members, dict.fromkeys(members.mine, "barrier"))
    if run := repeated.keep("barrier", (), group, members, dict.fromkeys(members.mine)):
        run(None)
        return
    engine = tensor_engine()
    values = {rank: engine.put(np.zeros(1, "int32"), rank) for rank in members.mine}
    got = tensor_engine().gather_all(members.ranks, values, [1] * len(members.ranks)).results()
    for value in got.values():
        engine.as_numpy(value)  # engines that run ahead have to be waited for


def _shapes(members: Group, values: dict[int, Any], call: str, same_shape: bool) -> list[Shape]:
    """Check that all ranks make one call, and return their shapes; they are exchanged unless all are the same."""
    first, words = next(iter(values.values())), f"{call}{members.order_in_words}"
    if same_shape:
        _check_equal(members, values, f"{words} of same_shape")
        return [shape_of(first)] * len(members.ranks)
    require_same(members, {rank: f"{words} {dtype_name(value)}" for rank, value in values.items()})
    shapes = list(shapes_of_all(members, values).values())
    if len(set(shapes)) == 1:
        note_compared(members.ranks, call_of(f"{words} of same_shape", first))
    return shapes


def _check_equal(members: Group, values: dict[int, Any], call: str) -> None:
    require_same(members, {rank: call_of(call, value) for rank, value in values.items()})


def _gathered(members: Group, values: dict[int, Any], shapes: list[Shape], async_op: bool, shaped: Shaped) -> Any:
    """An all-gather of tensors of these shapes."""
    parts = [math.prod(shape) for shape in shapes]
    flat = reshaped(values, (-1,))

    def finish(results: Values) -> Any:
        return members.answer(shaped(results))

    if async_op:
        return Work(tensor_engine().gather_all(members.ranks, flat, parts), finish)
    return finish(
        algorithms.differentiable(
            members,
            lambda given: tensor_engine().gather_all(members.ranks, given, parts),
            lambda cotangents: algorithms.reduce_scatter(members, cotangents, "sum", parts),
            flat,
        )
    )


def _counts(members: Group, sent: Mapping[int, list[Shape]], received: Mapping[int, list[Shape]]) -> Counts:
    """Return the elements from each rank to each, as far as this process sends or receives them."""
    counts = [[0] * len(members.ranks) for _ in members.ranks]
    for place, rank in enumerate(members.ranks):
        for other, shape in enumerate(sent.get(rank, [])):
            counts[place][other] = math.prod(shape)
        for other, shape in enumerate(received.get(rank, [])):
            counts[other][place] = math.prod(shape)
    if members.is_local:
        return Counts.of(counts)
    # what no process knows alone: the longest message of each round, and whether all are equal
    engine = tensor_engine()
    own = [count for place, rank in enumerate(members.ranks) if rank in sent for count in counts[place]]
    facts = np.array([*longest(counts), max(own), -min(own)], "int32")
    told = {rank: engine.put(facts, rank) for rank in members.mine}
    largest = algorithms.all_reduce(members, told, "max").results()
    *rounds, most, least = engine.as_numpy(next(iter(largest.values()))).tolist()
    return Counts(tuple(map(tuple, counts)), tuple(rounds), most == -least > 0)
