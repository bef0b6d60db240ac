"""Optimizers on JAX: an update is a part of the step, and XLA is told where slots are split further (`zero=`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from keras_flow.backends.hooking import hook
from keras_flow.backends.jax.layouts import engine_layout
from keras_flow.current.distribution import active
from keras_flow.current.keras_places import in_stateless_scope
from keras_flow.current.variable_layout import keras_layout

if TYPE_CHECKING:
    import keras
    from jax.sharding import NamedSharding


def splits_further(
    optimizer: keras.Optimizer, grads: object, trainable_variables: Sequence[keras.Variable] | None = None
) -> Sequence[keras.Variable] | None:
    """Condition of the hook on `BaseOptimizer.apply`: the variables, in a step whose slots may be split further."""
    distribution = active()
    if distribution is None or not distribution.zero_stage or not in_stateless_scope():
        return None
    return trainable_variables if trainable_variables is not None else optimizer._trainable_variables


@hook(
    "keras.Optimizer",
    "apply",
    "zero=: XLA would be free to compute an update on every rank, from gathered slots",
    when=splits_further,
)
def apply(
    updated: Sequence[keras.Variable],
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    grads: Sequence[jax.Array | None],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> object:
    """Hook on `BaseOptimizer.apply`: a rank updates its part of a variable whose slots are split further.

    Gradients and weights get the slots' layout before the update, and new weights after it. Left to itself, XLA may as
    well gather the slots and compute the update on every rank. The step's outputs have the variables' layouts, so that
    it gathers the new weights there.
    """
    parts = [_of_slots(variable) for variable in updated]
    grads = [
        grad if part is None or grad is None else jax.lax.with_sharding_constraint(grad, part)
        for grad, part in zip(grads, parts, strict=True)
    ]
    _constrain(updated, parts)
    result = original(optimizer, grads, trainable_variables)
    _constrain(updated, parts)
    return result


def _of_slots(variable: keras.Variable) -> NamedSharding | None:
    """The sharding of a variable's slots, where it is another one than the variable's."""
    layout = keras_layout(variable)
    if layout is None:
        return None
    of_slots = layout.distribution.slot_layout(layout)
    return None if of_slots.layout == layout.layout else engine_layout(of_slots.layout)


def _constrain(variables: Sequence[keras.Variable], parts: Sequence[NamedSharding | None]) -> None:
    for variable, part in zip(variables, parts, strict=True):
        if part is not None:
            # in a stateless scope: nothing is placed
            variable.assign(jax.lax.with_sharding_constraint(variable.value, part))
