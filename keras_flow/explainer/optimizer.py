"""The optimizer's variables: read, or made without values by a copy of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import keras

from keras_flow.current.variable_layout import VariableLayout, keras_layout
from keras_flow.distributions.dry_run import dry_run
from keras_flow.layout import Layout

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

#: the layout of a slot and its dtype
Slot: TypeAlias = tuple[VariableLayout, str]


def slots_of(distribution: FlowDistribution, model: keras.Model) -> tuple[list[Slot], list[str]]:
    """The optimizer's variables that are no scalars, and notes where that is not exact."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return [], ["the model is not compiled: no optimizer, so no slots are counted"]
    if not optimizer.built:
        try:
            copy = type(optimizer).from_config(optimizer.get_config())
            with dry_run(distribution.placement.size), distribution.scope():
                copy.build(model.trainable_variables)
            optimizer = copy
        except Exception as error:
            return [], [f"slots are not counted: {type(optimizer).__name__} could not be copied ({error})"]
    return [_slot(variable, distribution) for variable in optimizer.variables if len(variable.shape)], []


def _slot(variable: keras.Variable, distribution: FlowDistribution) -> Slot:
    layout = keras_layout(variable)
    whole = VariableLayout(Layout(distribution.placement, {}, tuple(variable.shape)), "default")
    return layout.given if layout else whole, keras.backend.standardize_dtype(variable.dtype)
