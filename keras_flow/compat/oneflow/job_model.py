"""The Keras model of a traced job, its training step and its results.

What a train job returns comes out of the step as the state of a metric: each row adds its values at its own place in an
array of zeros, a sum over rows, which every distribution adds up. The targets of the model are the rows' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_flow.compat.oneflow.blobs import Blob, Reduced, VariableBlob, apply
from keras_flow.compat.oneflow.tracing import TracedJob
from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.errors import FlowError

ops: Any = keras.ops  # of which Keras's annotations say that results may be None


class GivenLoss(keras.Loss):
    """The mean of what a model's output has for each row."""

    keras_flow_adds_rows = True

    def call(self, y_true: Any, y_pred: Any) -> Any:  # noqa: D102
        return ops.mean(ops.reshape(y_pred, (ops.shape(y_pred)[0], -1)), axis=-1)


class KeptRows(keras.Metric):
    """The values of all rows of a batch, in the order of their numbers.

    Args:
        shape: the shape of the values, [rows, ...].
        dtype: their dtype.
    """

    keras_flow_adds_rows = True

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        super().__init__(name="kept", dtype=dtype)
        self._rows = shape[0]
        self.kept = self.add_variable(tuple(shape), "zeros", dtype=dtype, name="kept")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # noqa: D102
        places = ops.reshape(ops.cast(y_true, "int32"), (-1, 1))
        values = ops.cast(y_pred, self.kept.dtype)
        self.kept.assign_add(ops.scatter(places, values, self.kept.shape))

    def result(self) -> Any:  # noqa: D102
        return self.kept.value


class JobModel:
    """A job for batches of so many rows.

    Args:
        trace: the trace of the job's function.
        inputs: the inputs of its placeholders, by name.
        outputs: what it returns or watches.
        distribution: the one under which its layers were made.
        rows: the number of rows of a batch.
        optimizer: the one of the job's other models; None: the job makes one.
    """

    def __init__(
        self,
        trace: TracedJob,
        inputs: Mapping[str, Any],
        outputs: Sequence[Blob],
        distribution: FlowDistribution,
        rows: int,
        optimizer: keras.Optimizer | None,
    ) -> None:
        self._rows, self._distribution, self._is_training = rows, distribution, trace.minimized is not None
        self._inputs, self._take_modes = inputs, trace.take_modes
        self._take_modes()
        #: name of an output -> its tensor; and of what value of the job it is
        self._tensors: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._names = [self._output(blob) for blob in outputs]
        loss = self._loss(trace.minimized[0]) if trace.minimized else None
        self.optimizer = optimizer
        with distribution.scope():
            self.model = keras.Model(list(inputs.values()), self._tensors, name=trace.job)
            if loss is not None and trace.minimized is not None:
                if not self.model.trainable_variables:
                    raise FlowError(f"job {trace.job!r} has no trainable variables to minimize its loss by")
                self.optimizer = optimizer or trace.minimized[1]()
                metrics = {name: [KeptRows((rows, *x.shape[1:]), _kept(x))] for name, x in self._tensors.items()}
                if loss not in self._names:
                    del metrics[loss]
                self.model.compile(self.optimizer, loss={loss: GivenLoss()}, metrics=metrics)

    def _output(self, blob: Blob) -> str:
        """The name of the output that holds a value; of a placeholder nothing is computed."""
        of_rows = blob.of_rows if isinstance(blob, Reduced) else blob
        for name, tensor in self._inputs.items():
            if tensor is of_rows.tensor:
                return f"input/{name}"
        return self._named(of_rows)

    def _named(self, blob: Blob) -> str:
        if known := [name for name, value in self._values.items() if value is blob.tensor]:
            return known[0]
        name = f"output{len(self._tensors)}"
        self._values[name] = tensor = blob.tensor
        if isinstance(blob, VariableBlob):
            tensor = apply(ops.copy, blob).tensor
        if blob.rows is None:  # a value of the whole batch stands in each row
            tensor = _in_rows(next(iter(self._inputs.values())), tensor)
        self._tensors[name] = tensor
        return name

    def _loss(self, loss: Blob) -> str:
        """The name of the output whose mean is minimized."""
        if isinstance(loss, Reduced) and loss.name == "mean":
            loss = loss.of_rows
        elif isinstance(loss, Reduced) and loss.name == "sum" and loss.of_rows.rows is not None:
            loss = Blob(loss.of_rows.tensor * float(self._rows), self._rows)
        return self._named(loss)

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The values of the outputs, of all rows."""
        if self._tensors:
            given = [arrays[name] for name in self._inputs]
            self._take_modes()
            with self._distribution.scope():
                found = self._trained(given) if self._is_training else self._predicted(given)
        else:
            found = {}
        return [
            arrays[name.removeprefix("input/")] if name.startswith("input/") else found[name] for name in self._names
        ]

    def _trained(self, given: list[np.ndarray]) -> dict[str, np.ndarray]:
        model: Any = self.model
        model.reset_metrics()
        places = dict.fromkeys(self._tensors, np.arange(self._rows, dtype="int32"))
        logs = model.train_on_batch(given, places, return_dict=True)
        found = {}
        for name, tensor in self._tensors.items():
            # Keras puts an output's name before its metric's, where there is more than one
            key = next((key for key in (f"{name}_kept", "kept") if key in logs), None)
            if key is not None:
                values = np.asarray(logs[key]).reshape(self._rows, *tensor.shape[1:])
                found[name] = values.astype(keras.backend.standardize_dtype(tensor.dtype))
        return found

    def _predicted(self, given: list[np.ndarray]) -> dict[str, np.ndarray]:
        model: Any = self.model
        return {name: np.asarray(value) for name, value in model.predict_on_batch(given).items()}


def _in_rows(rows: Any, value: Any) -> Any:
    """A value of the whole batch in each of its rows, [rows, ...]."""
    zeros = ops.zeros_like(ops.reshape(rows, (-1, math.prod(rows.shape[1:])))[:, 0])
    spread = ops.reshape(ops.cast(zeros, value.dtype), (-1, *(1,) * len(value.shape)))
    return spread + ops.expand_dims(value, 0)


def _kept(tensor: Any) -> str:
    """The dtype in which values are added up."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return "int32" if dtype == "bool" else dtype
