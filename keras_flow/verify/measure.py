"""The numbers of one step: outputs, losses, metrics, gradients and updates of a model on a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keras
import numpy as np
from ml_dtypes import finfo

from keras_flow.backends.active import backend
from keras_flow.current import models
from keras_flow.tensors.dtypes import is_float

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution
    from keras_flow.verify.state import State

#: learning rate of the plain update; a power of two, so that the gradient is read from the slot without rounding
RATE = 0.5


@dataclass(frozen=True)
class Batch:
    """Rows that are trained on: structures of arrays [rows, ...].

    Attributes:
        x, y, sample_weight: as `train_on_batch` takes them.
        name: its name in results, `"64 rows"`.
    """

    x: object
    y: object
    sample_weight: object
    name: str

    def rows(self, count: int, name: str) -> Batch:
        """The first `count` rows."""
        x, y, weight = (None if part is None else _cut(part, count) for part in (self.x, self.y, self.sample_weight))
        return Batch(x, y, weight, name)

    def in_dtype(self, dtype: str) -> Batch:
        """Return the rows with floating-point numbers in `dtype`."""
        parts = (None if part is None else _cast(part, dtype) for part in (self.x, self.y, self.sample_weight))
        return Batch(*parts, name=self.name)


def _cast(part: object, dtype: str) -> object:
    return keras.tree.map_structure(lambda leaf: leaf.astype(dtype) if is_float(leaf.dtype.name) else leaf, part)


def not_measured(model: keras.Model, own_step: bool) -> dict[str, str]:
    """Modes that cannot be measured, and why: a model with a `train_step` of its own need not define more.

    Asked after a step, since losses of layers are those of the last call.
    """
    if not own_step:
        return {}
    found = {}
    if model.loss is None and not model.losses and not models.has_own(model, "test_step"):
        found["evaluation"] = "evaluation, for which the model has no loss"
    if type(model).call is keras.Model.call:
        found["inference"] = "outputs, as the model has no call"
    return found


def _cut(part: object, count: int) -> object:
    return keras.tree.map_structure(lambda leaf: leaf[:count], part)


#: (mode, quantity, name) -> the value, and what is added to its tolerance: an update is a difference of two weights, so
#: it carries their rounding
Numbers = dict[tuple[str, str, str], tuple[np.ndarray, float]]


def measured(model: keras.Model, batch: Batch, distribution: FlowDistribution, state: State, own_step: bool) -> Numbers:
    """Run a step, an evaluation and a prediction on one batch; all their numbers.

    Args:
        model: a built and compiled model.
        batch: the rows.
        distribution: the one under which they run; one of a single rank is one device.
        state: the values to start from.
        own_step: whether the model has a `train_step` of the user's, which takes its own optimizer; else the step is
            one of plain SGD.
    """
    numbers: Numbers = {}
    with distribution.scope():
        distribution.adopt(model)
        if not own_step:
            # with momentum the slot is -rate * gradient after the first step: the gradient itself, on every engine
            model.optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
        backend().forget_steps(model)
        state.restore()
        logs = model.train_on_batch(batch.x, batch.y, batch.sample_weight, return_dict=True)
        _add_logs(numbers, "training", logs)
        if not own_step:
            trained = model.optimizer._trainable_variables
            for name, slot in zip(_names(trained), model.optimizer.momentums, strict=True):
                numbers["training", "gradient", name] = -_host(slot) / RATE, 0.0
        # weights change by the update, moving statistics by the call: both are compared
        names = _names([variable for variable, _ in state.values])
        for name, (variable, before) in zip(names, state.values, strict=True):
            if is_float(before.dtype.name) and any(variable is own for own in model.variables):
                after = _host(variable)
                rounding = float(finfo(before.dtype).eps * np.max(np.abs(after), initial=0.0))
                numbers["training", "update", name] = after - np.float64(before), rounding
        state.restore()
        absent = not_measured(model, own_step)
        if "evaluation" not in absent:
            logs = model.test_on_batch(batch.x, batch.y, batch.sample_weight, return_dict=True)
            _add_logs(numbers, "evaluation", logs)
            state.restore()
        outputs = model.predict_on_batch(batch.x) if "inference" not in absent else ()
        for place, output in enumerate(keras.tree.flatten(outputs)):
            numbers["inference", "output", f"output {place}"] = _host(output), 0.0
    return numbers


def _names(variables: Sequence[keras.Variable]) -> list[str]:
    """Paths of variables, numbered where several have one: `proj/kernel`, `proj/kernel (2)`."""
    seen: Counter[str] = Counter()
    names = []
    for variable in variables:
        seen[variable.path] += 1
        number = seen[variable.path]
        names.append(variable.path if number == 1 else f"{variable.path} ({number})")
    return names


def _add_logs(numbers: Numbers, mode: str, logs: dict[str, object]) -> None:
    for name, value in logs.items():
        numbers[mode, "loss" if name == "loss" else "metric", name] = np.asarray(value, "float64"), 0.0


def _host(value: object) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(value), "float64")
