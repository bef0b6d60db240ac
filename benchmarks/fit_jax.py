"""A training step on JAX that is written by hand, around a Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras

#: (variables that are trained, others, the optimizer's)
State = tuple[Any, Any, Any]


def jitted_step(model: keras.Model) -> Callable[[State, Any, Any], tuple[State, Any]]:
    """The compiled step of a model: (state, inputs, labels) -> (the next state, loss). It consumes the state."""

    def loss_of(trained, others, inputs, labels):
        outputs, others = model.stateless_call(trained, others, inputs, training=True)
        return model.loss(labels, outputs), others

    def step(state, inputs, labels):
        trained, others, slots = state
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained, others, inputs, labels)
        trained, slots = model.optimizer.stateless_apply(slots, gradients, trained)
        return (trained, others, slots), loss

    return jax.jit(step, donate_argnums=0)
