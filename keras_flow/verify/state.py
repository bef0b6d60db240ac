"""A model's state: everything that a training step changes, taken before a verification and given back after it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_flow.backends.active import backend
from keras_flow.current import models

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution


class RandomStates:
    """Of Python, NumPy and the engine, as they are when it is made."""

    def __init__(self) -> None:
        self._states = random.getstate(), np.random.get_state(), backend().random_state()

    def give_back(self) -> None:
        """Set them as they were."""
        python, numpy, engine = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        backend().set_random_state(engine)


class State:
    """Values of a model's variables in host memory, and the random states of the process.

    Taking them reads split variables whole: all ranks have to take part.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.values = [(variable, _host(variable)) for variable in _variables(model)]
        self._random = RandomStates()

    def give_back(self) -> None:
        """Set every variable that exists now to the value that it had; metrics made since start from zero."""
        self.model.reset_metrics()
        for variable, value in self.values:
            variable.assign(value)
        self._random.give_back()


def _variables(model: keras.Model) -> list[keras.Variable]:
    found = list(models.all_variables(model))
    if model.optimizer is not None:
        found += model.optimizer.variables
    # draws without a layer's own generator come from Keras's global one
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is not None:
        found.append(generator.state)
    return list({id(variable): variable for variable in found}.values())


def _host(variable: keras.Variable) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))


@contextmanager
def kept(model: keras.Model, distribution: FlowDistribution) -> Iterator[State]:
    """Inside, the model may be trained under any layouts; afterwards it has its values and those of `distribution`."""
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
            state.give_back()
