"""Collectives made of the two that every engine has, an exchange and an all-gather; and their gradients.

Where an engine has no all-reduce of its own, it is a reduce-scatter followed by an all-gather (Rabenseifner, 2004), in
which a rank receives 2 (n - 1) / n times the bytes of its tensor. A reduce-scatter is an exchange whose parts are added
up where they arrive.

Example: the largest of `[1, 8]` on rank 0 and `[5, 2]` on rank 1. Rank 0 gets the first elements, `[1, 5]`, and keeps
5; rank 1 gets `[8, 2]` and keeps 8; gathered, both have `[5, 8]`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.collective_engine import Counts, Pending
from keras_flow.comm.group import Group, Values, dtype_name, on_each, reshaped, shape_of
from keras_flow.errors import FlowError

OPS = ("sum", "mean", "min", "max", "product")

Begin = Callable[[Values], Pending]


def balanced(count: int, parts: int) -> list[int]:
    """A balanced split: 7 in 3 parts is 3, 2, 2."""
    return [count // parts + (place < count % parts) for place in range(parts)]


def differentiable(group: Group, begin: Begin, pullback: Begin, values: Values) -> Values:
    """Compute by `begin`, and let the engine compute gradients by `pullback`, which takes cotangents."""
    engine, mine = tensor_engine(), list(values)
    if not (has_gradient(values[mine[0]]) and engine.is_recorded(list(values.values()))):
        return begin(values).results()

    def run(function: Begin, given: Sequence[Any]) -> list[Any]:
        results = function(dict(zip(mine, given, strict=True))).results()
        return [results[rank] for rank in mine]

    results = engine.with_gradient(
        lambda given: run(begin, given), lambda cotangents: run(pullback, cotangents), list(values.values())
    )
    return dict(zip(mine, results, strict=True))


def has_gradient(value: Any) -> bool:
    """Whether tensors of this dtype have gradients."""
    return _is_continuous(dtype_name(value))


@functools.cache
def _is_continuous(name: str) -> bool:
    return name.startswith(("float", "bfloat", "complex"))


def check_op(op: str, value: Any, call: str) -> None:
    """Check that the numbers of a tensor can be reduced in this way.

    Raises:
        FlowError: they cannot.
    """
    _check_op(op, dtype_name(value), call)


@functools.cache
def _check_op(op: str, name: str, call: str) -> None:
    if op not in OPS:
        raise FlowError(f"kf.comm.{call}: op is one of {', '.join(OPS)}; got {op!r}")
    if op == "mean" and not _is_continuous(name):
        raise FlowError(f"kf.comm.{call}: the mean of {name} is no {name}; cast to a float, or take op='sum'")
    if name.startswith("float8"):
        raise FlowError(f"kf.comm.{call}: engines do not compute in {name}; cast it first")
    if name.startswith("complex") and op in ("min", "max"):
        raise FlowError(f"kf.comm.{call}: complex numbers have no order, so no {op}")


def no_gradient(op: str, call: str) -> Begin:
    """Raise, in the place of the gradient of an op that has none."""

    def refuse(cotangents: Values) -> Pending:
        raise FlowError(f"kf.comm.{call}: op={op!r} has no gradient; 'sum' and 'mean' have")

    return refuse


def all_reduce(group: Group, values: Values, op: str) -> Pending:
    """Reduce tensors over the ranks; every rank gets the result."""
    engine = tensor_engine()
    first = next(iter(values.values()))
    shape, count = shape_of(first), len(group.ranks)
    if count == 1 or 0 in shape:
        return Pending(lambda: values)
    kind, values = _of_mean(op, values, count)
    begun = engine.native("all_reduce", group.ranks, values, kind)
    if begun is None:
        parts = balanced(math.prod(shape), count)
        reduced = reduce_scatter(group, reshaped(values, (-1,)), kind, parts).results()
        whole = engine.gather_all(group.ranks, reduced, parts).results()
        shaped = reshaped(whole, shape)
        begun = Pending(lambda: shaped)
    return begun if kind == op or _is_half(first) else _then(begun, lambda value: value / count)


def reduce_scatter(group: Group, flat: Values, op: str, parts: Sequence[int]) -> Pending:
    """Reduce flat tensors over the ranks, and leave each rank its part."""
    engine, count = tensor_engine(), len(group.ranks)
    is_half = _is_half(next(iter(flat.values())))
    kind, flat = _of_mean(op, flat, count)
    got = engine.exchange(group.ranks, flat, Counts.of([list(parts)] * count))

    def folded(value: Any) -> Any:
        reduced = engine.fold(engine.reshape(value, (count, shape_of(value)[0] // count)), kind)
        return reduced if kind == op or is_half else reduced / count

    return _then(got, folded)


def _is_half(value: Any) -> bool:
    """Whether a sum of it may be out of range where the mean is not."""
    return dtype_name(value) == "float16"


def _of_mean(op: str, values: Values, count: int) -> tuple[str, Values]:
    """What is reduced, and how, for a mean; of float16 the parts of the mean are, as torch does it."""
    if op != "mean":
        return op, values
    is_half = _is_half(next(iter(values.values())))
    return "sum", on_each(values, lambda value: value / count) if is_half else values


def broadcast(group: Group, values: Values, source: int) -> Pending:
    """Send the value of one rank to all; of the others' values only the shape is used."""
    engine = tensor_engine()
    first = next(iter(values.values()))
    shape, count = shape_of(first), len(group.ranks)
    if count == 1 or 0 in shape:
        return Pending(lambda: values)
    begun = engine.native("broadcast", group.ranks, values, source)
    if begun is not None:
        return begun
    flat = reshaped(values, (-1,))
    size, place = math.prod(shape), group.ranks.index(source)
    # its parts to the ranks, which then gather them: no rank sends more than twice the tensor
    parts = balanced(size, count)
    counts = [parts if sender == place else [0] * count for sender in range(count)]
    sent = {rank: value if rank == source else value[:0] for rank, value in flat.items()}
    whole = engine.gather_all(
        group.ranks, engine.exchange(group.ranks, sent, Counts.of(counts)).results(), parts
    ).results()
    shaped = reshaped(whole, shape)
    return Pending(lambda: shaped)


def broadcast_text(members: Group, facts: Any, src: int) -> Any:
    """Send facts of rank `src` (texts, numbers, lists of them) to all ranks, as JSON, which cannot run code."""
    if members.is_local:
        return json.loads(json.dumps(facts))
    data = json.dumps(facts).encode() if src in members.mine else b""
    return json.loads(broadcast_bytes(members, data, src))


def broadcast_bytes(members: Group, data: bytes, src: int) -> bytes:
    """Send the bytes of rank `src` to all ranks: first their number, then the bytes."""
    engine = tensor_engine()
    sizes = {rank: engine.put(np.array([len(data)], "int32"), rank) for rank in members.mine}
    told = broadcast(members, sizes, src).results()
    size = int(engine.as_numpy(next(iter(told.values())))[0])
    blank = np.frombuffer(data, "uint8").copy() if data else np.zeros(size, "uint8")
    got = broadcast(members, {rank: engine.put(blank, rank) for rank in members.mine}, src).results()
    return engine.as_numpy(next(iter(got.values()))).tobytes()


def _then(begun: Pending, function: Callable[[Any], Any]) -> Pending:
    """Apply a function to the results once they are there."""
    return Pending(lambda: on_each(begun.results(), function), begun.is_completed)
