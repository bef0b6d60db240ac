"""Judgements of objects of Keras, kept on the object for as long as it does not change.

An object has not changed while it holds the same objects, in lists of the same lengths, and its class has the same
`call`. A change inside of these is not seen (an attribute of a function, for example), nor what a loop sets on a model.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Self

import keras

from keras_flow.backends.row_wise import own_code

#: the name of the entry: on the object itself, because what was seen keeps the object alive
_SEEN = "_keras_flow_rows"
#: lists that grow in place: graphs that a layer is part of, and its variables
_LISTS = ("_inbound_nodes", "_trainable_variables", "_non_trainable_variables")
#: what loops set and no call computes with: PyTorch's flag, on each layer twice an epoch; on a model also what may hold
#: the data, and all arrays of a step
_OF_LAYERS = ("training",)
_OF_MODELS = tuple(
    """training history train_function test_function predict_function stop_training stop_evaluating stop_predicting
    _eval_epoch_iterator _distributed_dataset _initial_epoch _jax_state _jax_state_synced""".split()
)


@dataclass(eq=False)
class Look:
    """A look at an object: what tells later whether it has changed.

    Attributes:
        kind: its class.
        call: its class's `call`.
        sizes: the lengths of its lists.
        changes: how often classes of Keras had been patched.
        left_out: the names of what loops set on it.
        members: what else it held.
    """

    kind: type
    call: object
    sizes: tuple[int, ...]
    changes: int
    left_out: tuple[str, ...]
    members: list[object]

    @classmethod
    def at(cls, thing: object) -> Self:
        """Look at an object, and keep what is seen on it."""
        members, kind = vars(thing), type(thing)
        left_out = _OF_MODELS if isinstance(thing, keras.Model) else _OF_LAYERS
        look = cls(kind, getattr(kind, "call", None), _sizes(members), own_code.changes(), left_out, [])
        members[_SEEN] = look  # Keras would track it as an attribute
        look.members = [*_without(left_out, members).values()]
        return look

    def is_of(self, thing: Any) -> bool:
        """Whether an object is as it was: some two microseconds, since it is asked in each step."""
        kind = thing.__class__
        members = _without(self.left_out, thing.__dict__)
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
    """Return the last look at an object; None where nobody has looked."""
    return vars(thing).get(_SEEN)


def _sizes(members: dict[str, Any]) -> tuple[int, ...]:
    return tuple([len(members[name]) for name in _LISTS if name in members])


def _without(names: tuple[str, ...], members: dict[str, Any]) -> dict[str, Any]:
    rest = members.copy()
    for name in names:
        rest.pop(name, None)
    return rest
