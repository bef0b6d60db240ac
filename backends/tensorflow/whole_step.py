"""The last resort for a step that DTensor cannot partition: one device computes it, from gathered weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow.data import to_tensors
from keras_flow.backends.tensorflow.devices import rank_devices, world
from keras_flow.backends.tensorflow.mesh_values import from_logical
from keras_flow.backends.tensorflow.mesh_variables import is_watched
from keras_flow.backends.tensorflow.traced_step import compiled
from keras_flow.backends.tensorflow.variables import to_host
from keras_flow.current import reachable
from keras_flow.current.distribution import Distribution, as_under, holding
from keras_flow.current.models import all_variables, optimizers_of, with_inner


class WholeStep:
    """A step method of a model, compiled for the device of the first rank.

    Each call gathers the variables into plain copies, lets Keras's step work on these without any distribution and puts
    what changed on the mesh again.

    Args:
        model: the model.
        step: `train_step`, `test_step` or `predict_step`.
        distribution: the variables keep its layouts.
        compile: whether the step is to be compiled, as one that is no `tf.function` yet.
        with_optimizer: whether the step may read or change the model's optimizer, whose slots are copied then.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Callable,
        distribution: Distribution,
        compile: bool = True,
        with_optimizer: bool = True,
    ):
        self.model = model
        self.distribution = distribution
        self.with_optimizer = with_optimizer
        own = world().local_ranks
        # of several processes each computes the same, on a device of its own
        self.device = rank_devices()[next((rank for rank in distribution.placement.ranks if rank in own), own[0])]
        self._function = compiled(step) if compile else step
        # id of a variable -> that variable, whose id stays its own, and its copy
        self._copies: dict[int, tuple[keras.Variable, tf.Variable]] = {}

    def __call__(self, data: object) -> object:
        """Run the step on a host batch; the results are plain tensors."""
        return self.run(to_tensors(data, self.model))

    def run(self, *args: object, **kwargs: object) -> object:
        """Run the step on plain tensors; the results are plain tensors."""
        found = self._variables()
        on_mesh = (variable for variable in found if isinstance(variable._value, dtensor.DVariable))
        # an optimizer and the model may list one variable twice; it must have one copy
        variables = list({id(variable): variable for variable in on_mesh}.values())
        values = [to_host(variable._value) for variable in variables]
        copies = [self._copy(variable, value) for variable, value in zip(variables, values, strict=True)]
        ours = as_under(self.distribution)
        unbuilt = [optimizer for optimizer in self._optimizers() if not optimizer.built]
        # with a distribution active, the hooks would put what the step makes on the mesh again
        with holding(None), _standing_in(variables, copies), tf.device(self.device), ours:
            outputs = self._function(*args, **kwargs)
        for variable, before, copy in zip(variables, values, copies, strict=True):
            after = copy.numpy()
            if after.tobytes() != before.tobytes():
                target = variable._value
                target.assign(from_logical(after, target.layout, target.dtype))
        for optimizer in unbuilt:
            if optimizer.built:
                self._lay_slots(optimizer)
        return outputs

    def _variables(self) -> Iterator[keras.Variable]:
        """All that a step may read or change, its closures' and the optimizers' too; the same one may come twice."""
        yield from all_variables(self.model, global_seed=True)
        if self.with_optimizer:
            yield from (variable for variable, _ in reachable.variables(self.model))

    def _optimizers(self) -> Iterator[keras.Optimizer]:
        """The optimizers whose slots the step may make."""
        for optimizer in optimizers_of(self.model) if self.with_optimizer else ():
            yield from with_inner(optimizer)

    def _lay_slots(self, optimizer: keras.Optimizer) -> None:
        """Lay the slots that the step has made: what they were, which the compiled step knows, is their copy now."""
        for slot in optimizer._variables:
            if not isinstance(slot._value, dtensor.DVariable):
                self._copies[id(slot)] = slot, slot._value
        self.distribution.lay_optimizer(optimizer)

    def _copy(self, variable: keras.Variable, value: np.ndarray) -> tf.Variable:
        if id(variable) not in self._copies:
            with tf.init_scope(), tf.device(self.device):
                copy = tf.Variable(
                    tf.constant(value), dtype=variable._dtype, trainable=is_watched(variable), name=variable.name
                )
            # optimizers find their slots by it; private, TensorFlow 2.21 and Keras 3.15
            copy._unique_id = variable._value._unique_id  # type: ignore[attr-defined]
            self._copies[id(variable)] = variable, copy
        copy = self._copies[id(variable)][1]
        copy.assign(value)
        return copy


@contextmanager
def _standing_in(variables: list[keras.Variable], copies: list[tf.Variable]) -> Iterator[None]:
    """The variables have plain values inside."""
    values = [variable._value for variable in variables]
    for variable, copy in zip(variables, copies, strict=True):
        variable._value = copy
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
