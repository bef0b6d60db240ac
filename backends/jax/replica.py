"""`kf.DistributedDataParallel` on JAX: a compiled function of this process's weights and tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_flow.backends.engine_records import Replica
from keras_flow.backends.traced_by_weights import traced_by_weights


def make_replica(model: keras.Model, ranks: tuple[int, ...], bucket_bytes: int, find_unused: bool) -> Replica:
    """Make a replica that uses `jax.value_and_grad` of a stateless call.

    All gradients are there at once, so `kf.comm` averages them.
    """

    def gradients_of(loss_function: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[Any, list[Any]]]:
        def stateless(trained: list[jax.Array], others: list[jax.Array], args: Any) -> tuple[jax.Array, Any]:
            trainable, rest = _variables(model)
            values = [*zip(trainable, trained, strict=True), *zip(rest, others, strict=True)]
            with keras.StatelessScope(state_mapping=values) as scope:
                result = loss_function(*args)
            loss = result[0] if has_aux else result
            return loss, (result, [scope.get_current_value(each) for each in rest])

        run = jax.jit(jax.value_and_grad(stateless, has_aux=True))

        def step(*args: Any) -> tuple[Any, list[Any]]:
            trainable, rest = _variables(model)
            (_, (result, after)), found = run([v.value for v in trainable], [v.value for v in rest], args)
            for variable, value in zip(rest, after, strict=True):
                variable.assign(value)
            return result, found

        return step

    return Replica(model, traced_by_weights(model, gradients_of))


def _variables(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Trainable weights, and everything else: moving statistics, seeds, metrics."""
    trainable = model.trainable_weights
    known = {id(each) for each in trainable}
    return trainable, [each for each in model.variables if id(each) not in known]
