"""Splits that became broadcast, and when that is said: one warning for all variables of one rule and reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from keras_flow.errors import LayoutFallback, warn


def first_of(paths: Iterable[str]) -> str:
    """The first path, and how many more there are.

    Example:
        >>> first_of(["block0/up/kernel"]), first_of(["block0/up/kernel", "block1/up/kernel"])
        ('block0/up/kernel', 'block0/up/kernel and 1 more')
    """
    first, *more = paths
    return f"{first} and {len(more)} more" if more else first


class Fallbacks:
    """The fallbacks of one distribution.

    A model has many layers that are alike, so variables that are made `together` are named together. Each variable is
    named once, as a model is built more than once.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], list[str]] = {}
        self._known: set[tuple[str, str]] = set()
        self._open = 0

    def add(self, path: str, rule: str, reason: str) -> None:
        """Say why a variable is whole, at the end of the outermost `together`; at once where none is open.

        Args:
            path: the variable's.
            rule: what asked for the split.
            reason: why it cannot be, without the path.
        """
        if (path, reason) not in self._known:
            self._known.add((path, reason))
            self._waiting.setdefault((rule, reason), []).append(path)
        if not self._open:
            self.say()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Gather the fallbacks of what is made inside; if that ends in an error, they wait for the next occasion."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
        if not self._open:
            self.say()

    def say(self) -> None:
        """Warn of all fallbacks that wait."""
        waiting, self._waiting = self._waiting, {}
        for (_, reason), paths in waiting.items():
            warn(f"{first_of(paths)}: {reason}", LayoutFallback)
