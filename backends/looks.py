"""What was seen of an object of Keras, kept on it, and whether it is still so.

An object is as it was while all that it holds are the same objects, in lists of the same lengths, and its class has the
same `call`. Not seen is what changes within these: an attribute of a function, say.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Self

from keras_flow.backends import own_code

#: the name of the entry: on the object itself, because what was seen keeps the object alive
_SEEN = "_keras_flow_rows"
#: lists that grow in place: graphs that a layer is part of, and its variables
_LISTS = ("_inbound_nodes", "_trainable_variables", "_non_trainable_variables")


@dataclass(eq=False)
class Look:
    """What was seen of an object.

    Attributes:
        kind: its class.
        call: its class's `call`.
        sizes: the lengths of its lists.
        changes: how often classes of Keras had been patched.
        members: what it held.
    """

    kind: type
    call: object
    sizes: tuple[int, ...]
    changes: int
    members: list[object]

    @classmethod
    def at(cls, thing: object) -> Self:
        """Look at an object, and keep what is seen on it."""
        members, kind = vars(thing), type(thing)
        look = cls(kind, getattr(kind, "call", None), _sizes(members), own_code.changes(), [])
        members[_SEEN] = look  # Keras would track it as an attribute
        look.members = [*members.values()]
        return look

    def is_of(self, thing: Any) -> bool:
        """Whether an object is as it was: some two microseconds, since it is asked in each step."""
        members, kind = thing.__dict__, thing.__class__
        return (
            kind is self.kind
            and getattr(kind, "call", None) is self.call
            and own_code.changes() == self.changes
            and len(members) == len(self.members)
            # equality is not asked: that of two tensors may be a collective
            and all(map(operator.is_, members.values(), self.members))
            and _sizes(members) == self.sizes
        )


def last(thing: object) -> Any:
    """What was last seen of an object; None where nobody has looked."""
    return vars(thing).get(_SEEN)


def _sizes(members: dict[str, Any]) -> tuple[int, ...]:
    return tuple([len(members[name]) for name in _LISTS if name in members])
