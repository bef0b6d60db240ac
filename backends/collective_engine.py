"""The part of an engine that `kf.comm` uses: two ways to move elements, its own reductions, and gradients.

Values are mappings, rank -> the engine's array, with the ranks of a group that this process drives. Every process that
drives ranks of the group makes the call. `exchange`, `gather_all` and `native` return at once, with a `Pending`.

Example: ranks 0 and 1 hold `[a, b]` and `[c, d]`. `exchange` with counts `[[1, 1], [1, 1]]` leaves `[a, c]` and
`[b, d]`. `fold` adds these up: `a + c` on rank 0, `b + d` on rank 1. `gather_all` gives both sums to both ranks: the
three together are an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Pending:
    """A collective that was begun.

    Attributes:
        results: waits for it, and gives rank -> array.
        is_completed: whether it would not have to wait.
    """

    results: Callable[[], Mapping[int, Any]]
    is_completed: Callable[[], bool] = lambda: True


#: calls of `kf.comm` that give a list
LISTED = frozenset(["all_gather", "all_to_all", "gather"])


def roles(call: str, rank: int, how: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a rank gives tensors in a call of `kf.comm`, and whether it gets something; `how` as in `direct`."""
    gives = rank == how[0] if call == "scatter" else call not in ("recv", "barrier")
    gets = rank == how[-1] if call in ("reduce", "gather") else call not in ("send", "barrier")
    return gives, gets


@dataclass(frozen=True)
class Counts:
    """Elements that the members of a group send each other.

    Attributes:
        table: `table[sender][receiver]` by place in the group; a process may know no more than the rows and columns of
            its own ranks, and has zeros elsewhere.
        longest: for each k the longest message to the k-th member after the sender; the same on all.
        is_even: whether all messages have one length, and are not empty; the same on all.
    """

    table: tuple[tuple[int, ...], ...]
    longest: tuple[int, ...]
    is_even: bool

    @classmethod
    def of(cls, table: Sequence[Sequence[int]]) -> Counts:
        """Make the counts of a table that is known whole."""
        sizes = {count for row in table for count in row}
        return cls(tuple(map(tuple, table)), longest(table), len(sizes) == 1 and sizes != {0})

    def transposed(self) -> Counts:
        """The counts of the way back: what rank a sent to rank b, b sends to a."""
        around = self.longest[:1] + self.longest[:0:-1]  # k places back are n - k places on
        return Counts(tuple(zip(*self.table, strict=True)), around, self.is_even)


def longest(table: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """For each k the longest message to the k-th member after the sender."""
    count = len(table)
    return tuple(max(table[place][(place + k) % count] for place in range(count)) for k in range(count))


class CollectiveEngine(Protocol):
    """Each engine's `collectives.py`."""

    def key_of(self, value: object, rank: int) -> tuple[Any, ...] | None:
        """The dtype and shape, to find calls by, of the engine's own array on the device of a rank.

        None where it has to be converted or moved, or where its gradient may be asked for.
        """
        ...

    def exchange(self, ranks: tuple[int, ...], values: Mapping[int, Any], counts: Counts) -> Pending:
        """Every rank sends a part of its flat array to every rank of the group.

        Args:
            ranks: the group, ascending: engines order the members of a group by rank.
            values: flat arrays: the parts for each member, one after the other.
            counts: the elements of these parts.

        Returns:
            Flat arrays: the parts of each member, one after the other.
        """
        ...

    def gather_all(self, ranks: tuple[int, ...], values: Mapping[int, Any], counts: Sequence[int]) -> Pending:
        """Flat arrays of all members, one after the other, on each; `counts` are their elements."""
        ...

    def native(self, kind: str, ranks: tuple[int, ...], values: Mapping[int, Any], how: str | int) -> Pending | None:
        """The engine's own collective, where it has one for this kind and dtype.

        Args:
            kind: `"all_reduce"`, where `how` is `"sum"`, `"min"`, `"max"` or `"product"`, or `"broadcast"`, where it is
                the rank that sends.
            ranks: the group.
            values: arrays of one shape.
            how: see `kind`.

        Returns:
            None where it has none: then `kf.comm` puts one together.
        """
        ...

    def direct(
        self, call: str, ranks: tuple[int, ...], like: Any, how: tuple[Any, ...], async_op: bool
    ) -> Callable[[Any], Any] | None:
        """A call of `kf.comm` as one function of what this process gives, for loops; it has no gradient.

        Args:
            call: the name in `kf.comm`.
            ranks: the group, of which this process drives one, and each other process one, too.
            like: an array, or a list of arrays, of the dtype and shape of what it will be called with; where it is
                called with None, of what another rank gives: a part of a scatter, or a message.
            how: what the call is given beside its tensors, by call:

                | call | `how` |
                |---|---|
                | `all_reduce`, `reduce_scatter`, `reduce_scatter_tensor` | (op,) |
                | `reduce` | (op, the rank that gets the result) |
                | `broadcast`, `scatter` | (the rank that gives,) |
                | `gather` | (the rank that gets,) |
                | `send` | (the rank that gets the message,) |
                | `recv` | (the rank that gives the message,) |
                | `all_gather`, `all_gather_into_tensor`, `all_to_all`, `barrier` | () |
            async_op: the function gives a `Pending`, where the engine runs collectives beside the program.

        Returns:
            None where the engine has no such function of such arrays.
        """
        ...

    def fold(self, rows: Any, op: str) -> Any:
        """The sum, smallest, largest or product of rows [ranks, elements], in their dtype; bool: any and all."""
        ...

    def reshape(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The array in another shape; a shape of (-1,) makes it flat."""
        ...

    def join(self, flat: Sequence[Any]) -> Any:
        """Flat arrays of one rank, one after the other."""
        ...

    def shape(self, value: Any) -> tuple[int, ...]:
        """The shape as numbers."""
        ...

    def without_gradient(self, value: Any) -> Any:
        """The array, of which the engine will ask for no gradient."""
        ...

    def is_recorded(self, values: Sequence[Any]) -> bool:
        """Whether the engine will ask for gradients of what is made of these arrays.

        Raises:
            FlowError: it is called where the engine traces a program, which has no values yet.
        """
        ...

    def with_gradient(
        self,
        forward: Callable[[Sequence[Any]], list[Any]],
        backward: Callable[[Sequence[Any]], list[Any]],
        values: Sequence[Any],
    ) -> list[Any]:
        """`forward(values)`; the engine's gradient of it is `backward(cotangents)`."""
        ...
