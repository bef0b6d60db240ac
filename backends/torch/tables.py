"""Variables on parameter servers: tensors of which this process has no elements, and says where they are.

Example: a table of 5 rows on 2 servers has the rows 0 to 2 on the first, 3 and 4 on the second. A batch with the tokens
4, 0 and 4 gets row 0 from the first server and row 4 from the second, and sends a gradient for each of these two rows.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch
from torch.utils import _pytree

from keras_flow.backends import logical_random
from keras_flow.backends.hooking import hook
from keras_flow.backends.initializers import constant_of, is_drawn
from keras_flow.backends.mail.calls import Line, LostProcessError
from keras_flow.backends.torch import tensors
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.variable_layout import KerasLayout
from keras_flow.errors import LostServerError
from keras_flow.scoped import setting

#: to the servers, in their order, where this process is the chief or a worker
_lines: list[Line] = []
#: where this process is a server: its number, and key -> its part
_number = -1
_held: dict[str, Any] = {}
#: server -> keys of what it holds for variables and optimizers that are gone, which it is told with the next question
_gone: dict[int, deque[str]] = {}
_keys = itertools.count()


@dataclass(frozen=True)
class ServedPlace:
    """The servers that have the rows of a variable.

    Attributes:
        key: by which servers know it.
        servers: which have parts of it.
        rows: the rows of each part; empty where one server has it whole.
        shape: of the variable.
        dtype: of the variable, as Keras calls it.
    """

    key: str
    servers: tuple[int, ...]
    rows: tuple[range, ...]
    shape: tuple[int, ...]
    dtype: str

    def part(self, number: int, value: Any) -> Any:
        """The part of a value, or of a gradient, that a server has."""
        if not self.rows:
            return value
        rows = self.rows[number]
        if not getattr(value, "is_sparse", False):
            return value[rows.start : rows.stop]
        numbers = value.indices()[0]
        here = (numbers >= rows.start) & (numbers < rows.stop)
        return rows_of_table(numbers[here] - rows.start, value.values()[here], (len(rows), *self.shape[1:]))


def rows_of_table(numbers: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A gradient of a table, of which these rows are not zero; each number is there once, and they ascend."""
    return torch.sparse_coo_tensor(numbers[None], rows, tuple(shape), is_coalesced=True, check_invariants=False)


@dataclass
class Read:
    """What a step has read of a variable, if it keeps that."""

    is_kept: bool = False
    value: torch.Tensor | None = None


class ServedTensor(torch.Tensor):
    """A tensor on servers: operators read it, and write what they change; each goes over the network.

    Attributes:
        place: where it is.
        read: what was read of it.
    """

    place: ServedPlace
    read: Read

    @staticmethod
    def __new__(cls: Any, place: ServedPlace, read: Read | None = None) -> ServedTensor:  # noqa: D102
        dtype = core.to_torch_dtype(place.dtype)
        made = torch.Tensor._make_wrapper_subclass(cls, place.shape, dtype=dtype, device=core.get_device())
        made.place, made.read = place, read or Read()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].place, args[0].read)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            write(args[0].place, args[1])
            return args[0]
        known: dict[str, torch.Tensor] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, cls):
                return leaf
            if leaf.place.key not in known:
                known[leaf.place.key] = leaf.whole()
            return known[leaf.place.key]

        found = func(*_pytree.tree_map(whole, args), **_pytree.tree_map(whole, kwargs))
        # what the operator has changed in place
        for each, said in zip(args, func._schema.arguments, strict=False):
            if said.alias_info is not None and said.alias_info.is_write:
                for changed in _pytree.tree_leaves(each):
                    if isinstance(changed, cls):
                        write(changed.place, known[changed.place.key])
                found = each if found is not None else None
        return found

    def whole(self) -> torch.Tensor:
        """All elements."""
        if self.read.value is not None:
            return self.read.value
        (value,) = read_all([self.place])
        if self.read.is_kept:
            self.read.value = value
        return value

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """All elements."""
        return tensors.as_numpy(self.whole())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"ServedTensor({self.place})"

    def __reduce_ex__(self, proto: Any) -> Any:
        return _arrived, (self.place,)


def _arrived(place: ServedPlace) -> torch.Tensor:
    """A variable that another process has sent: on its server its part there."""
    if _number in place.servers:
        return torch.nn.Parameter(_held[place.key], requires_grad=False)
    return ServedTensor(place)


def join(lines: Sequence[Line]) -> None:
    """Let this process reach servers."""
    _lines[:] = lines


# ---- what is asked of servers


def ask(server: int, what: str, value: Any = None, **told: Any) -> Callable[[], Any]:
    """Ask a server; returns what waits for its answer.

    Raises:
        LostServerError: it is gone; or later, by what waits.
    """
    line, gone = _lines[server], _gone.get(server, deque())
    try:
        waits = line.begin(what, value, gone=[gone.popleft() for _ in range(len(gone))], **told)
    except LostProcessError as error:
        raise LostServerError(f"{line.name} ({line.address})") from error

    def wait() -> Any:
        try:
            return waits()
        except LostProcessError as error:
            raise LostServerError(f"{line.name} ({line.address})") from error

    return wait


def read_all(places: Sequence[ServedPlace]) -> list[torch.Tensor]:
    """Read variables, of each server all at once."""
    servers = sorted({server for place in places for server in place.servers})
    asked = {server: [place.key for place in places if server in place.servers] for server in servers}
    waits = {server: ask(server, "read", keys=keys) for server, keys in asked.items()}
    found = {server: dict(zip(asked[server], wait(), strict=True)) for server, wait in waits.items()}
    parts = [[tensors.put(found[server][place.key], 0) for server in place.servers] for place in places]
    return [each[0] if len(each) == 1 else torch.cat(each) for each in parts]


def read_rows(place: ServedPlace, numbers: torch.Tensor) -> torch.Tensor:
    """Read rows of a table by their numbers, which ascend."""
    rows = place.rows or (range(place.shape[0]),)
    waits = []
    for server, part in zip(place.servers, rows, strict=True):
        here = numbers[(numbers >= part.start) & (numbers < part.stop)] - part.start
        if len(here):
            waits.append(ask(server, "rows", tensors.as_numpy(here), key=place.key))
    found = [tensors.put(wait(), 0) for wait in waits]
    none = torch.empty((0, *place.shape[1:]), dtype=core.to_torch_dtype(place.dtype), device=core.get_device())
    return torch.cat([*found, none])


def write(place: ServedPlace, value: Any) -> None:
    """Give a variable a value."""
    value = tensors.as_numpy(torch.broadcast_to(core.convert_to_tensor(value, place.dtype).detach(), place.shape))
    waits = [
        ask(server, "write", place.part(number, value), key=place.key) for number, server in enumerate(place.servers)
    ]
    for wait in waits:
        wait()


# ---- variables


def is_served(placed: KerasLayout | None) -> bool:
    """Whether a layout is that of a variable on servers."""
    return bool(_lines) and placed is not None and 0 not in placed.layout.placement.ranks


def make(variable: keras.Variable, block: Block, placed: KerasLayout) -> None:
    """Give a variable its place on servers; `block` gives the elements of a part, or one number for all."""
    layout, dtype = placed.layout, str(variable._dtype)
    ranks = layout.placement.ranks if not layout.is_broadcast else layout.placement.ranks[:1]
    slices = [layout.local_slices(rank) for rank in ranks] if len(ranks) > 1 else [None]
    rows = tuple(range(each[0].start, each[0].stop) for each in slices if each)
    place = ServedPlace(f"{next(_keys)}", tuple(rank - 1 for rank in ranks), rows, tuple(layout.shape), dtype)
    for server, each in zip(place.servers, slices, strict=True):
        index = each or tuple(slice(0, length) for length in place.shape)
        shape = [part.stop - part.start for part in index]
        value = block(index)
        told: dict[str, Any] = {"key": place.key, "shape": shape, "dtype": dtype}
        if not isinstance(value, torch.Tensor):
            told["fill"], value = value, None
        ask(server, "make", None if value is None else tensors.as_numpy(value), **told)()
    is_trained = variable._trainable and core.to_torch_dtype(dtype).is_floating_point
    variable._value = torch.nn.Parameter(ServedTensor(place), requires_grad=is_trained)
    variable._layout = placed
    # its tensors have it: a variable that is laid again gets others
    forget_with(place, place.key, place.servers)


def forget_with(owner: object, key: str, servers: Iterable[int]) -> None:
    """Let servers forget what they hold under a key when its owner is gone."""
    for server in servers:
        weakref.finalize(owner, _gone.setdefault(server, deque()).append, key).atexit = False


#: gives the elements of a new variable in a block of it, or one number for all
Block = Callable[[tuple[slice, ...]], Any]


def block_of(initializer: Any, shape: tuple[int, ...], dtype: str) -> Block:
    """The blocks of a new variable, made the cheapest way."""
    constant = constant_of(initializer)
    if constant is not None:
        return lambda index: float(constant)
    kind = core.to_torch_dtype(dtype)
    if is_drawn(initializer) and logical_random.drawing() is not None:
        fill = logical_random.draw_block(initializer, shape, dtype)
        return lambda index: fill(list(index), torch.empty([each.stop - each.start for each in index], dtype=kind))
    return cut_of(core.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype))


def cut_of(value: torch.Tensor) -> Block:
    """The blocks of a value."""
    return lambda index: value.detach()[index] if value.ndim else value.detach()


def shards(value: ServedTensor) -> dict[int, np.ndarray]:
    """rank -> its part."""
    place, whole = value.place, value.numpy()
    return {server + 1: place.part(number, whole) for number, server in enumerate(place.servers)}


# ---- rows that a worker looks up


@dataclass
class Lookups:
    """The rows of a table that a step has read: their numbers, and the rows, by which gradients are taken."""

    place: ServedPlace
    numbers: list[torch.Tensor] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)


#: `id` of a table's variable -> what a worker's step reads of it
_looked_up: ContextVar[Mapping[int, Lookups] | None] = ContextVar("keras_flow_lookups", default=None)


def looking_up(tables: Mapping[int, Lookups]) -> AbstractContextManager[None]:
    """Inside, a worker computes a step that may look rows of these tables up."""
    return setting(_looked_up, tables)


def table_of(x: object, indices: object, axis: int | None = None) -> Lookups | None:
    """Condition of the hook on `take`: the table on servers whose rows are taken."""
    known = _looked_up.get()
    return known.get(id(x)) if known and axis == 0 else None


@hook(
    "keras:numpy",
    "take",
    "a table on servers would be sent whole to each worker, for the few rows of a batch",
    when=table_of,
)
def take(
    table: Lookups, original: Callable[..., torch.Tensor], x: keras.Variable, indices: Any, axis: int | None = None
) -> torch.Tensor:
    """Hook on `take`: rows by their numbers, each from the server that has it, and once."""
    numbers = core.convert_to_tensor(indices).long()
    numbers = torch.where(numbers < 0, numbers + table.place.shape[0], numbers)
    used, at = torch.unique(numbers, return_inverse=True)
    rows = read_rows(table.place, used).requires_grad_()
    table.numbers.append(used)
    table.rows.append(rows)
    # gradients of rows that are used several times are added up as the table's dtype has them
    return torch.nn.functional.embedding(at, rows).to(core.to_torch_dtype(x.dtype))


def summed(numbers: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are there several times, once: optimizers square what is in them."""
    used, at = torch.unique(torch.cat(list(numbers)), return_inverse=True)
    every = torch.cat(list(rows))
    return used, torch.zeros((len(used), *every.shape[1:]), dtype=every.dtype, device=every.device).index_add_(
        0, at, every
    )


# ---- what a server does


def serve(number: int) -> Mapping[str, Callable[..., Any]]:
    """Let this process be a server; what it answers to questions of variables, by their names."""
    global _number
    _number = number
    return {"make": _make, "read": _read, "rows": _rows, "write": _write}


def hold(key: str, value: Any) -> None:
    """Hold something for the chief, until it says that the key is gone."""
    _held[key] = value


def held(key: str) -> Any:
    """What this server holds under a key."""
    return _held[key]


def forget(keys: Iterable[str]) -> None:
    """Hold no more what the chief says is gone."""
    for key in keys:
        _held.pop(key, None)


def _make(told: Mapping[str, Any], value: Any) -> None:
    dtype = core.to_torch_dtype(told["dtype"])
    made = tensors.put(value, 0) if value is not None else torch.full(told["shape"], told["fill"], dtype=dtype)
    _held[told["key"]] = made.cpu()


def _read(told: Mapping[str, Any], value: Any) -> list[np.ndarray]:
    # a copy: it is sent while others may write
    return [tensors.as_numpy(_held[key].clone()) for key in told["keys"]]


def _rows(told: Mapping[str, Any], value: np.ndarray) -> np.ndarray:
    return tensors.as_numpy(_held[told["key"]][torch.from_numpy(value)])


def _write(told: Mapping[str, Any], value: np.ndarray) -> None:
    held = _held[told["key"]]
    held.copy_(tensors.put(value, 0).reshape(held.shape))
