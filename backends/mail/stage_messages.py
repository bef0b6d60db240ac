"""Messages between processes of a pipeline that may each drive several ranks: letters, and one all-reduce."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_flow.backends.active import backend, tensor_engine
from keras_flow.backends.mail import letters
from keras_flow.backends.rendezvous import meeting
from keras_flow.current.distribution import Distribution

#: numbers of messages: those of a pipeline's stages are not negative
_TOLD, _ADDED = -1, -2


def send_tensors(
    tensors: Any, pair: tuple[int, int], tag: int, told: dict[object, Any], key: object
) -> Callable[[], None]:
    """Begin to send a structure of tensors; a letter says what it holds."""
    return letters.post((*pair, tag), tensors)


def receive_tensors(
    pair: tuple[int, int], tag: int, told: dict[object, Any], key: object, split: Distribution | None = None
) -> Callable[[], Any]:
    """Return a function that waits for a letter, and puts its content on the device of the rank that receives it."""
    return lambda: backend().on(pair[1], letters.letter((*pair, tag)), split)


def sum_over_processes(value: Any) -> Any:
    """The sum of a scalar over all processes, in each: up a binomial tree to process 0, and from it to all."""
    members = _members(None)
    here = backend().world().process_index
    for _, other in meeting.below(here, len(members)):
        value = value + backend().on(members[here], letters.letter((members[other], members[here], _ADDED)))
    if here:
        letters.post((members[here], members[_above(here)], _ADDED), value)
    return from_process_of(members[0], value, True)


def sum_over_ranks(
    ranks: tuple[int, ...],
    given: Sequence[list[Any]],
    weights: Sequence[keras.Variable],
    split: Distribution | None = None,
) -> Callable[[], list[Any]]:
    """Sum the gradients of a stage on its first rank in each process.

    The all-reduce between processes is begun when the sums are asked for: all processes ask in one order.
    """
    members = _members(ranks)
    home = next(rank for rank in ranks if rank in backend().world().local_ranks)
    total, *others = given  # in the order in which the lanes got there
    for more in others:
        total = backend().add(total, more)
    return functools.partial(_reduced, members, home, total, weights) if len(members) > 1 else lambda: total


def from_process_of(rank: int, value: Any, is_like: bool, ranks: tuple[int, ...] | None = None) -> Any:
    """Broadcast a structure of tensors from the process that drives a rank, down a binomial tree."""
    members, world = _members(ranks), backend().world()
    first = next(place for place, each in enumerate(members) if world.process_of(each) == world.process_of(rank))
    members = [*members[first:], *members[:first]]
    here = next(place for place, each in enumerate(members) if each in world.local_ranks)
    if here:
        value = backend().on(members[here], letters.letter((members[_above(here)], members[here], _TOLD)))
    for _, other in reversed([*meeting.below(here, len(members))]):
        letters.post((members[here], members[other], _TOLD), value)
    return value


def _members(ranks: tuple[int, ...] | None) -> list[int]:
    """The first of some ranks in each process that drives any; of all ranks where it is None."""
    world = backend().world()
    return list(world.first_of_each_process(range(world.size) if ranks is None else ranks))


def _above(place: int) -> int:
    """Who tells a place of a binomial tree, and hears it: the place without its lowest bit."""
    return place & (place - 1)


def _reduced(members: Sequence[int], home: int, own: list[Any], weights: Sequence[keras.Variable]) -> list[Any]:
    """Gradients summed between processes; None where no process has one."""
    engine, sums = tensor_engine(), list(own)
    for dtype in {weight.dtype: None for weight in weights}:
        numbers = [number for number, weight in enumerate(weights) if weight.dtype == dtype]
        sizes = [math.prod(weights[number].shape) for number in numbers]
        # a process that had no rows has none. So a number for each says whether there is one
        there = keras.ops.convert_to_tensor([float(own[number] is not None) for number in numbers], dtype)
        parts = [
            keras.ops.zeros((size,), dtype) if own[number] is None else engine.reshape(own[number], (-1,))
            for number, size in zip(numbers, sizes, strict=True)
        ]
        with engine.on_rank(home):
            joined = engine.join(backend().on(home, [*parts, there]))
        begun = engine.native("all_reduce", tuple(sorted(members)), {home: joined}, "sum")
        assert begun is not None, dtype
        found: Any = keras.ops.split(begun.results()[home], [sum(sizes[: place + 1]) for place in range(len(sizes))])
        counts: Any = keras.ops.convert_to_numpy(found[-1])
        for place, number in enumerate(numbers):
            shape = tuple(weights[number].shape)
            sums[number] = engine.reshape(found[place], shape) if counts[place] else None
    return sums
