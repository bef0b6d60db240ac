"""Pieces and messages: what the rules of an exchange speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keras_flow.boxing.blocks import Box, volume


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a box of the logical tensor, counted in row-major order within the box."""

    box: Box
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def lengths(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Message:
    """One message: `sender` sends `piece`, `receiver` adds it to what it has there (zero at first).

    `origin` says which of the sender's buffers: `source` (its shard), `combined` (what it added up in `combine`) or
    `result` (what it added up in `reduce`).
    """

    sender: int
    receiver: int
    piece: Piece
    origin: str = "source"


#: phase -> the buffer that it fills: the target's shard, or one for combined sums that lies as the source's shard
WRITES = {"move": "result", "merge": "result", "combine": "combined", "reduce": "result", "gather": "result"}


@dataclass(frozen=True)
class Share:
    """A range of an atom: `owner` ends up with the sum, `merger` adds the summands (usually the owner itself)."""

    merger: int
    owner: int
    piece: Piece


@dataclass(frozen=True)
class Shares:
    """The shares of an atom: all in their order, and those of each owner."""

    all: tuple[Share, ...]
    owned: Mapping[int, list[Share]]

    @classmethod
    def of(cls, shares: tuple[Share, ...]) -> Shares:
        owned: dict[int, list[Share]] = {}
        for share in shares:
            owned.setdefault(share.owner, []).append(share)
        return cls(shares, owned)


@dataclass(frozen=True)
class Lacking:
    """What the members that keep an atom's summands lack: receipts of all copies together, and whether all is
    lacking."""

    total: int
    everything: bool


def whole(box: Box) -> Piece:
    """All elements of a box."""
    return Piece(box, 0, volume(box))
