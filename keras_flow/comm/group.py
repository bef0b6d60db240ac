"""The ranks of a collective, the tensors that this process gives for its own, and whether all call the same.

A process that drives one rank gives and gets that rank's tensor; one that drives several a mapping, rank -> tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import keras
import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.collective_engine import Counts
from keras_flow.backends.rendezvous import meeting
from keras_flow.errors import FlowError
from keras_flow.placements import Placement
from keras_flow.tensors.dtypes import default_of_values, numpy_dtype
from keras_flow.tensors.global_tensor import GlobalTensor

#: words of 32 bits in which ranks tell each other the shape of a tensor
_SHAPE_WORDS = 12

#: what a rank calls: its words, and the dtype and shape of a tensor where they count; written out when it is compared
Call = str | tuple[str, Any, tuple[int, ...]]

#: (ranks, call) that were compared between them: a call that is repeated is not compared again
_compared: set[tuple[tuple[int, ...], Call]] = set()

#: rank -> the engine's array
Values = Mapping[int, Any]


@dataclass(frozen=True)
class Group:
    """The ranks that take part.

    Attributes:
        ranks: ascending, as engines order the members of a group.
        mine: those that this process drives.
        order: in the order of the placement, which lists of the caller have.
    """

    ranks: tuple[int, ...]
    mine: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement | None, call: str) -> Group:
        """The group of a placement; of all ranks where it is None.

        Raises:
            FlowError: the job has not all of its ranks.
        """
        world = tensor_engine().world()
        if placement is None:
            return _of_all(world.size, world.local_ranks)
        if not isinstance(placement, Placement):
            raise FlowError(f"kf.comm.{call}: group is a kf.Placement of ranks, or None for all; got {placement!r}")
        outside = sorted(rank for rank in placement.ranks if rank >= world.size)
        if outside:
            raise FlowError(f"kf.comm.{call}: the group has ranks {outside}; the job has 0 to {world.size - 1}")
        ranks = tuple(sorted(placement.ranks))
        return cls(ranks, tuple(rank for rank in ranks if rank in world.local_ranks), placement.ranks)

    @property
    def is_local(self) -> bool:
        """Whether this process drives all of them: nobody else has to be asked."""
        return len(self.mine) == len(self.ranks)

    @property
    def order_in_words(self) -> str:
        """The order of the placement, where it is not that of ranks: calls with lists have to agree on it."""
        return "" if self.order == self.ranks else f" in the order {list(self.order)}"

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Put values that are in ascending order of ranks into the order of the placement."""
        return [values[self.ranks.index(rank)] for rank in self.order]

    def by_rank(self, values: Sequence[Any]) -> list[Any]:
        """Put values that are in the order of the placement into ascending order of ranks."""
        return [values[self.order.index(rank)] for rank in self.ranks]

    def check_member(self, rank: int, call: str) -> None:
        """Check that a rank belongs to the group."""
        if rank not in self.ranks:
            raise FlowError(f"kf.comm.{call}: rank {rank} is not in the group {list(self.ranks)}")

    def tensors(self, given: object, call: str) -> dict[int, Any]:
        """Rank -> array, of what the caller gave for the ranks of this process."""
        engine = tensor_engine()
        # asked first, because it is what a loop gives
        if self.mine == engine.world().local_ranks and len(self.mine) == 1 and engine.key_of(given, self.mine[0]):
            return {self.mine[0]: given}
        return {rank: as_tensor(value, rank, call) for rank, value in self.of_ranks(given, call).items()}

    def lists(self, given: object, call: str) -> dict[int, list[Any]]:
        """Rank -> a list with one array for each member, by rank."""
        found = {}
        for rank, values in self.of_ranks(given, call).items():
            if not isinstance(values, Sequence) or len(values) != len(self.ranks):
                raise FlowError(
                    f"kf.comm.{call}: rank {rank} must give a list with one tensor for each of the "
                    f"{len(self.ranks)} ranks of the group"
                )
            found[rank] = [as_tensor(value, rank, call) for value in _of_one_dtype(self.by_rank(values))]
            names = {dtype_name(value) for value in found[rank]}
            if len(names) > 1:
                raise FlowError(f"kf.comm.{call}: rank {rank} gives tensors of several dtypes: {sorted(names)}")
        return found

    def objects(self, given: object, call: str) -> dict[int, Any]:
        """Rank -> the object that was given for it. That of a single rank may be a mapping, whose keys are its own."""
        if len(tensor_engine().world().local_ranks) == 1:
            return dict.fromkeys(self.mine, given)
        return self.of_ranks(given, call)

    def of_ranks(self, given: object, call: str) -> dict[int, Any]:
        """Rank -> what was given for it: no mapping, or a mapping of ranks."""
        local = tensor_engine().world().local_ranks
        if isinstance(given, Mapping):
            missing = [rank for rank in self.mine if rank not in given]
            if missing:
                raise FlowError(f"kf.comm.{call}: nothing given for ranks {missing}, which this process drives")
            return {rank: given[rank] for rank in self.mine}
        if len(local) > 1:
            raise FlowError(
                f"kf.comm.{call}: this process drives ranks {list(local)}; give a tensor for each, "
                f"{{{local[0]}: ..., {local[1]}: ...}}"
            )
        return dict.fromkeys(self.mine, given)

    def answer(self, results: Mapping[int, Any]) -> Any:
        """Return to the caller the result of its one rank, or rank -> result."""
        if len(tensor_engine().world().local_ranks) == 1:
            return next(iter(results.values()), None)
        return dict(results)


@functools.cache
def _of_all(size: int, local_ranks: tuple[int, ...]) -> Group:
    every = tuple(range(size))
    return Group(every, tuple(sorted(local_ranks)), every)


def as_tensor(value: object, rank: int, call: str) -> Any:
    """The engine's array; arrays keep their dtype, Python numbers take Keras's defaults.

    Raises:
        FlowError: it is a global tensor.
    """
    if isinstance(value, GlobalTensor):
        raise FlowError(
            f"kf.comm.{call} takes tensors of one rank, and this is a global tensor; x.to_global(sbp=...) changes its "
            "layout, x.to_local() gives this rank's part"
        )
    engine = tensor_engine()
    if keras.ops.is_tensor(value) and not isinstance(value, np.ndarray):
        return keras.ops.convert_to_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return engine.put(np.asarray(value), rank)
    if isinstance(value, (list, tuple, float, int)):
        array = np.asarray(value)
        return engine.put(array.astype(default_of_values(array), copy=False), rank)
    raise FlowError(f"kf.comm.{call}: {type(value).__name__} is no tensor of {engine.name}, nor numbers")


def _of_one_dtype(values: Sequence[Any]) -> list[Any]:
    """Lists of numbers as arrays of their common dtype: `[]` beside `[1]` has whole numbers."""
    plain = [isinstance(value, (list, tuple, float, int)) for value in values]
    arrays = [np.asarray(value) for value, is_plain in zip(values, plain, strict=True) if is_plain]
    kinds = [array.dtype for array in arrays if array.size]  # `[]` has none of its own
    wanted = default_of_values(np.zeros(0, np.result_type(*kinds) if kinds else int))
    return [
        np.asarray(value).astype(wanted) if is_plain else value for value, is_plain in zip(values, plain, strict=True)
    ]


def dtype_name(value: Any) -> str:
    """The dtype as engines and numpy write it."""
    return _name_of_dtype(value.dtype)


@functools.cache
def _name_of_dtype(dtype: Any) -> str:
    return getattr(dtype, "name", "") or str(dtype).rpartition(".")[2]


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape as numbers."""
    return tensor_engine().shape(value)


def reshaped(values: Values, shape: tuple[int, ...]) -> Values:
    """Return the tensors in another shape; (-1,) is flat. A tensor that has the shape is not touched.

    The shapes that they have may differ.
    """
    if all(shape_of(each) == shape or (shape == (-1,) and len(each.shape) == 1) for each in values.values()):
        return values
    return on_each(values, lambda value: tensor_engine().reshape(value, shape))


def on_each(values: Mapping[int, Any], function: Callable[..., Any]) -> dict[int, Any]:
    """Apply a function to each rank's value, on that rank's device."""
    results = {}
    for rank, value in values.items():
        with tensor_engine().on_rank(rank):
            results[rank] = function(value)
    return results


def empty(dtype: str, rank: int) -> Any:
    """A flat tensor without elements."""
    return tensor_engine().put(np.zeros(0, numpy_dtype(dtype)), rank)


def parts_of(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Cut a flat tensor into tensors of these shapes."""
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    starts = [0, *ends[:-1]]
    return [
        tensor_engine().reshape(flat[start:end], shape) for start, end, shape in zip(starts, ends, shapes, strict=True)
    ]


def call_of(words: str, value: Any) -> Call:
    """A call with a tensor, as `require_same` compares it."""
    return words, value.dtype, shape_of(value)


def require_same(group: Group, calls: Mapping[int, Call]) -> None:
    """Check that all ranks of a group make one call: the processes meet the first time that they do.

    Raises:
        FlowError: another rank calls something else.
    """
    first = next(iter(calls.values()))
    key, are_equal = (group.ranks, first), len(calls) == 1 or len(set(calls.values())) == 1
    if not group.is_local:
        count_call(processes_of(group.ranks))
    if key in _compared and are_equal:
        enter(group, first if isinstance(first, str) else first[0])
        return
    found = {rank: _as_call(call) for rank, call in calls.items()}
    if not group.is_local:
        _meet(group, ", ".join(dict.fromkeys(found.values())))
    for rank, text in found.items():
        if text != found[min(found)]:
            raise FlowError(
                f"kf.comm: rank {min(found)} calls {found[min(found)]} where rank {rank} calls {text}. Every rank of a "
                "group must make the same calls, in the same order"
            )
    _compared.add(key)


def enter(group: Group, words: str) -> None:
    """Enter a call that was compared before, without a meeting of its processes."""
    if not group.is_local and processes_of(group.ranks) is None:
        # its line is found where somebody asks for it
        meeting.enter(f"kf.comm.{words.partition(' ')[0]}", "", waits=True)


def _meet(group: Group, words: str) -> None:
    some = processes_of(group.ranks)
    if some is None:
        meeting.meet(f"kf.comm.{words}", waits=True)
    else:
        meeting.meet_some(f"kf.comm.{words} of ranks {list(group.ranks)}", some)


def count_call(some: tuple[int, ...] | None) -> None:
    """Count a call of some processes; those of all (None) have numbers."""
    if some is not None:
        meeting.count(meeting.group_of(some))


@functools.cache
def processes_of(ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The processes that drive some ranks; None where these are all of the job."""
    world = tensor_engine().world()
    found = tuple(sorted({world.process_of(rank) for rank in ranks}))
    return None if len(found) == world.process_count else found


def note_compared(ranks: tuple[int, ...], call: Call) -> None:
    """Note that all these ranks are known to make this call."""
    _compared.add((ranks, call))


def is_compared(ranks: tuple[int, ...], call: Call) -> bool:
    """Whether all these ranks are known to make this call."""
    return (ranks, call) in _compared


def forget_compared() -> None:
    """Compare all calls again."""
    _compared.clear()


def shapes_of_all(group: Group, values: Values) -> dict[int, tuple[int, ...]]:
    """Rank -> shape of its tensor, for all ranks of the group."""
    shapes = {rank: shape_of(value) for rank, value in values.items()}
    if group.is_local:
        return {rank: shapes[rank] for rank in group.ranks}
    rows = _gathered(group, {rank: shape_words(shape) for rank, shape in shapes.items()}, _SHAPE_WORDS)
    return {rank: shape_of_words(row) for rank, row in rows.items()}


def shape_words(shape: tuple[int, ...]) -> np.ndarray:
    """A shape in words of 32 bits: how many dims, and their lengths."""
    if len(shape) >= _SHAPE_WORDS:
        raise FlowError(f"kf.comm takes tensors of up to {_SHAPE_WORDS - 1} dims; this one has {len(shape)}")
    return np.array([len(shape), *shape] + [0] * (_SHAPE_WORDS - 1 - len(shape)), "int32")


def shape_of_words(row: np.ndarray) -> tuple[int, ...]:
    """Return the shape that `shape_words` wrote."""
    return tuple(int(length) for length in row[1 : 1 + row[0]])


def exchanged_shapes(group: Group, shapes: Mapping[int, Sequence[tuple[int, ...]]]) -> dict[int, list[tuple[int, ...]]]:
    """Exchange shapes: return those of the tensors that each rank of this process will get from each member."""
    if group.is_local:
        return {rank: [shapes[sender][place] for sender in group.ranks] for place, rank in enumerate(group.ranks)}
    engine, count = tensor_engine(), len(group.ranks)
    sent = {
        rank: engine.put(np.concatenate([shape_words(shape) for shape in row]), rank) for rank, row in shapes.items()
    }
    got = engine.exchange(group.ranks, sent, Counts.of([[_SHAPE_WORDS] * count] * count)).results()
    return {
        rank: [shape_of_words(row) for row in engine.as_numpy(value).reshape(count, -1)] for rank, value in got.items()
    }


def _gathered(group: Group, words: Mapping[int, np.ndarray], length: int) -> dict[int, np.ndarray]:
    """Gather the words of all ranks, by rank."""
    engine = tensor_engine()
    values = {rank: engine.put(row, rank) for rank, row in words.items()}
    got = engine.gather_all(group.ranks, values, [length] * len(group.ranks)).results()
    rows = engine.as_numpy(next(iter(got.values()))).reshape(len(group.ranks), length)
    return dict(zip(group.ranks, rows, strict=True))


def _as_call(call: Call) -> str:
    return call if isinstance(call, str) else f"{call[0]} {_name_of_dtype(call[1])}{list(call[2])}"
