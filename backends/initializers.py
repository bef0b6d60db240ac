"""Initialisers that an engine draws shard by shard."""

from __future__ import annotations


def draws_as(initializer: object, kinds: tuple[type, ...]) -> bool:
    """Whether an initialiser makes its values as one of these classes does; a user's own class may do more."""
    return any(type(initializer).__call__ is kind.__call__ for kind in kinds)
