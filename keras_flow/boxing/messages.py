"""Messages: what one rank sends another in a phase of an exchange.

A message carries one *piece*: some consecutive elements, in row-major order, of a box of the logical tensor.

Example: the second half of the lower row of a 2x2 tensor.

    >>> Piece(((1, 2), (0, 2)), 1, 2).size
    1
"""

from __future__ import annotations

from dataclasses import dataclass

from keras_flow.boxing.blocks import Box, volume


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a box of the logical tensor, counted in row-major order within the box."""

    box: Box
    start: int
    stop: int

    @classmethod
    def whole(cls, box: Box) -> Piece:
        """All elements of a box."""
        return cls(box, 0, volume(box))

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Message:
    """`sender` sends `piece`; `receiver` adds it to what it has there, zero at first.

    `origin` names the sender's buffer that the piece is read from: `source` (its shard) or `result` (what it has of the
    target's shard). Where sender and receiver are one rank nothing is sent: it takes the piece from itself.
    """

    sender: int
    receiver: int
    piece: Piece
    origin: str = "source"

    @property
    def order(self) -> tuple[Box, int, int, str]:
        """Key by which sender and receiver sort the messages between them, so that none needs a header."""
        return self.piece.box, self.piece.start, self.piece.stop, self.origin
