"""A model's state: everything that a training step changes, saved before a verification and restored after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_flow.backends import random_states
from keras_flow.backends.active import backend
from keras_flow.current import models

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution


class State:
    """The values of a model's variables in host memory, and the random states of the process.

    Split variables are gathered to be copied, so all ranks have to take part.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        changed = models.all_variables(model, optimizers=True, global_seed=True)
        self.values = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in changed]
        self._random = random_states.states()

    def restore(self) -> None:
        """Set every variable to the saved value; metrics that were created since then start from zero."""
        self.model.reset_metrics()
        for variable, value in self.values:
            variable.assign(value)
        random_states.set_states(self._random)


@contextmanager
def restored(model: keras.Model, distribution: FlowDistribution) -> Iterator[State]:
    """Inside, the model may be trained under any layouts; at the end it has its values again, under `distribution`."""
    with distribution.scope():
        distribution.adopt(model)
        state = State(model)
    optimizer = model.optimizer
    try:
        yield state
    finally:
        model.optimizer = optimizer
        with distribution.scope():
            distribution.adopt(model)
            backend().forget_steps(model)
            state.restore()
