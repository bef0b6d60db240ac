"""Which batch a gradient is of, and how far the variables had moved on meanwhile: each batch counts once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counts that the chief keeps of an asynchronous training.

    Attributes:
        updates: gradients that were applied.
        dropped: gradients of batches that were applied before.
        staleness: the most updates that came between the sending of a batch and the update with its gradient.
        repeated: batches that a second worker was given, since the first one hangs.
        of_worker: worker -> batches that it has computed.
    """

    updates: int = 0
    dropped: int = 0
    staleness: int = 0
    repeated: int = 0
    of_worker: Counter[int] = field(default_factory=Counter)

    def logs(self) -> dict[str, int]:
        """The counts as `fit` logs them, beside loss and metrics."""
        names = ("updates", "dropped", "staleness", "repeated")
        return {f"server_{name}": getattr(self, name) for name in names}


#: an epoch and a batch in it
Key = tuple[int, int]


class Ledger:
    """The batches of a model that are on their way, and those that have come back.

    Args:
        staleness: how many updates may come between the sending of a batch and the update with its gradient; None: any
            number.
        most: batches that may be on their way.
        statistics: where to count, with other models.

    Example:
        >>> ledger = Ledger(staleness=0, most=2)
        >>> ledger.may_send()
        True
        >>> ledger.sent((0, 0))
        >>> ledger.may_send()
        False
        >>> ledger.came_back((0, 0), worker=1), ledger.came_back((0, 0), worker=0)
        (True, False)
        >>> ledger.statistics
        Statistics(updates=1, dropped=1, staleness=0, repeated=0, of_worker=Counter({1: 1, 0: 1}))
    """

    def __init__(self, staleness: int | None, most: int, statistics: Statistics | None = None):
        self._bound, self._most = staleness, most
        self.statistics = Statistics() if statistics is None else statistics
        self._sent_at: dict[Key, int] = {}

    @property
    def on_their_way(self) -> int:
        """How many batches are sent and have not come back."""
        return len(self._sent_at)

    def may_send(self) -> bool:
        """Whether one batch more may be sent: those on their way may all come back before the oldest of them."""
        count = self.on_their_way
        if not count or self._bound is None:
            return count < self._most
        behind = self.statistics.updates - min(self._sent_at.values())
        return count < self._most and behind + count <= self._bound

    def sent(self, key: Key) -> None:
        """Note that a batch was sent with the variables as they are now."""
        self._sent_at[key] = self.statistics.updates

    def came_back(self, key: Key, worker: int) -> bool:
        """Note the gradient of a batch; whether it is to be applied."""
        found = self.statistics
        found.of_worker[worker] += 1
        if key not in self._sent_at:
            found.dropped += 1
            return False
        found.staleness = max(found.staleness, found.updates - self._sent_at.pop(key))
        found.updates += 1
        return True

    def forget(self) -> None:
        """A training was broken off: what is on its way will not be taken."""
        self._sent_at.clear()
