"""What an optimizer of Keras has for one of the model's variables."""

from __future__ import annotations

import keras


def slots_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> list[keras.Variable]:
    """The optimizer's variables for one of the model's: Keras keeps lists in the order of the model's variables."""
    # Adafactor's rows and columns have other shapes than the variable, and are left out here
    index, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
    lists = [slots for slots in vars(optimizer).values() if isinstance(slots, list) and len(slots) == count]
    same_shape = [slots[index] for slots in lists if getattr(slots[index], "shape", None) == variable.shape]
    return [each for each in same_shape if each is not variable]
