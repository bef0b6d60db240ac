"""One collective that an engine ran, and the bytes that a rank receives in it by a ring."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Counted:
    """A collective as counted.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `permute`.
        elements: elements of the larger side on one rank.
        itemsize: bytes of an element.
        group: ranks that take part.
        note: what the engine says of it.
        pairs: of a permute, how many ranks receive something.
    """

    kind: str
    elements: int
    itemsize: int
    group: int
    note: str = ""
    pairs: int = 0

    @property
    def received(self) -> float:
        """Bytes that a rank receives."""
        size, p = self.elements * self.itemsize, self.group
        if p == 1:
            return 0.0
        return {"all_reduce": 2 * size * (p - 1) / p, "permute": float(size)}.get(self.kind, size * (p - 1) / p)

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "received": self.received}
