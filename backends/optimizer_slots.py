"""The variables that an optimizer of Keras has for one of the model's variables."""

from __future__ import annotations

import keras


def slots_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> list[keras.Variable]:
    """The optimizer's variables for one of the model's: Keras keeps lists in the order of the model's variables."""
    # Adafactor's rows and columns have other shapes than the variable, and are left out here
    index, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
    lists = [slots for slots in vars(optimizer).values() if isinstance(slots, list) and len(slots) == count]
    same_shape = [slots[index] for slots in lists if getattr(slots[index], "shape", None) == variable.shape]
    return [each for each in same_shape if each is not variable]


#: whose updates of some rows are those rows of the update of all
_BY_ELEMENT = ("SGD", "Adam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Lion", "Ftrl")


def updates_by_element(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer updates each element by itself, so that a part of a variable can be updated alone."""
    known = [getattr(keras.optimizers, name).update_step for name in _BY_ELEMENT]
    return type(optimizer).update_step in known
