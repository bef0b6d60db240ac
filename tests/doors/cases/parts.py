"""Doors of optimizers, metrics, losses, and of `keras.distribution`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.doors.cases.registry import door, values, weights
from tests.doors.stage import Stage


def _fit(s: Stage, epochs: int = 1) -> list[float]:
    return s.model.fit(s.x, s.y, batch_size=len(s.x), epochs=epochs, verbose=0).history["loss"]


@door("Optimizer.iterations", "Optimizer.learning_rate", "Optimizer.variables")
def learning_rate(s: Stage) -> Any:
    first = _fit(s)
    s.model.optimizer.learning_rate = 0.05
    s.model.optimizer.learning_rate.assign(0.02)
    second = _fit(s, 2)
    optimizer = s.model.optimizer
    return first, second, int(optimizer.iterations), float(optimizer.learning_rate), values(optimizer.variables)


def _momentum(s: Stage) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(s.model.trainable_variables)
    return {"optimizer": optimizer}


@door("Optimizer.build", "Optimizer.apply", "Optimizer.apply_gradients", make=_momentum)
def apply(s: Stage) -> Any:
    optimizer, trained = s.extra["optimizer"], s.model.trainable_variables
    for _ in range(2):
        optimizer.apply([keras.ops.ones(variable.shape) * 0.1 for variable in trained], trained)
        optimizer.apply_gradients([(keras.ops.ones(variable.shape) * 0.1, variable) for variable in trained])
    return s.model.get_weights(), values(optimizer.variables)


@door("Optimizer.stateless_apply", make=_momentum)
def stateless_apply(s: Stage) -> Any:
    optimizer, trained = s.extra["optimizer"], s.model.trainable_variables
    state = [variable.value for variable in optimizer.variables]
    gradients = [keras.ops.ones(variable.shape) for variable in trained]
    if keras.backend.backend() == "tensorflow":
        return None  # Keras's own: "not supported" with TensorFlow
    new, state = optimizer.stateless_apply(state, gradients, [variable.value for variable in trained])
    return [keras.ops.convert_to_numpy(value) for value in (*new, *state)]


@door("Optimizer.set_weights", "Optimizer.save_own_variables", "Optimizer.load_own_variables")
def optimizer_weights(s: Stage) -> Any:
    s.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    _fit(s)
    kept: dict[str, Any] = {}
    s.model.optimizer.save_own_variables(kept)
    kept = {name: np.asarray(value) for name, value in kept.items()}
    s.model.optimizer.set_weights([value * 0 for value in values(s.model.optimizer.variables)])
    s.model.optimizer.load_own_variables(kept)
    return _fit(s, 2), sorted(kept.items()), weights(s.model)


@door("Optimizer.get_config", "Optimizer.from_config", "Optimizer.exclude_from_weight_decay")
def optimizer_from_config(s: Stage) -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer = keras.optimizers.AdamW.from_config(optimizer.get_config())
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    s.model.compile(optimizer, "mse")
    return _fit(s, 2), weights(s.model)


@door("Optimizer.finalize_variable_values")
def ema(s: Stage) -> Any:
    s.model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
    loss = _fit(s, 2)
    s.model.optimizer.finalize_variable_values(s.model.trainable_variables)
    return loss, weights(s.model)


def _scaled(s: Stage) -> dict[str, Any]:
    return {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)}


@door("Optimizer.scale_loss", make=_scaled)
def scale_loss(s: Stage) -> Any:
    s.model.compile(s.extra["optimizer"], "mse")
    return _fit(s, 2), weights(s.model), float(s.model.optimizer.scale_loss(1.0))


class Slots(keras.optimizers.Optimizer):
    """An optimizer of the user's own, by every method for writing one."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.first = self.add_optimizer_variables(variables, "first")
        self.second = [self.add_variable_from_reference(variable, name="second") for variable in variables]
        self.steps = self.add_variable((), name="steps")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        first = self.first[self._get_variable_index(variable)]
        self.assign(first, 0.5 * first + gradient)
        self.assign_add(self.second[self._get_variable_index(variable)], keras.ops.square(gradient))
        self.assign_add(self.steps, keras.ops.ones(()))
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * first)


@door(
    "Optimizer.add_variable",
    "Optimizer.add_variable_from_reference",
    "Optimizer.add_optimizer_variables",
    "Optimizer.assign",
    "Optimizer.assign_add",
    "Optimizer.assign_sub",
    "Optimizer.update_step",
    make=lambda s: {"optimizer": Slots(0.1)},
)
def own_optimizer(s: Stage) -> Any:
    s.model.compile(s.extra["optimizer"], "mse")
    return _fit(s, 2), weights(s.model)


def _metric(s: Stage) -> dict[str, Any]:
    return {"metric": keras.metrics.MeanAbsoluteError(name="made"), "auc": keras.metrics.AUC(name="auc")}


@door("Metric.update_state", "Metric.result", "Metric.reset_state", "Metric.variables", make=_metric)
def metric(s: Stage) -> Any:
    found = []
    for _ in range(2):
        s.extra["metric"].update_state(s.y, s.model.predict(s.x, verbose=0))
        found.append(float(s.extra["metric"].result()))
    s.extra["auc"].update_state(s.y[:, 0] > 0, 1 / (1 + np.exp(-s.x[:, 0])))
    found.append(float(s.extra["auc"].result()))
    state = values(s.extra["metric"].variables)
    s.extra["metric"].reset_state()
    return found, state, values(s.extra["metric"].variables)


class Largest(keras.metrics.Metric):
    """A metric of the user's own: sums of errors and rows, each by one of the methods that add a variable."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.total = self.add_variable((), keras.initializers.Zeros(), name="total")
        self.rows = self.add_weight(shape=(), initializer="zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = keras.ops.max(keras.ops.abs(keras.ops.cast(y_true, self.dtype) - y_pred), axis=-1)
        self.total.assign_add(keras.ops.sum(errors))
        self.rows.assign_add(keras.ops.cast(keras.ops.size(errors), self.dtype))

    def result(self) -> Any:
        return self.total / self.rows


@door("Metric.add_variable", "Metric.add_weight", "Metric.dtype", make=lambda s: {"metric": Largest()})
def metric_in_compile(s: Stage) -> Any:
    s.model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[s.extra["metric"]], weighted_metrics=["mse"])
    history = s.model.fit(s.x, s.y, batch_size=5, shuffle=False, epochs=2, validation_data=(s.x, s.y), verbose=0)
    return sorted(history.history.items()), s.model.evaluate(s.x, s.y, verbose=0, return_dict=True)


@door("Metric.stateless_update_state", "Metric.stateless_result", "Metric.stateless_reset_state", make=_metric)
def stateless_metric(s: Stage) -> Any:
    state = s.extra["metric"].stateless_reset_state()
    state = s.extra["metric"].stateless_update_state(state, s.y, s.y + 1)
    return float(s.extra["metric"].stateless_result(state))


@door("Metric.get_config", "Metric.from_config", "Loss.get_config", "Loss.from_config", "Loss.call", "Loss.dtype")
def losses(s: Stage) -> Any:
    loss = keras.losses.Huber.from_config(keras.losses.Huber(0.5).get_config())
    metric = keras.metrics.MeanSquaredError.from_config(keras.metrics.MeanSquaredError(name="m").get_config())
    s.model.compile(keras.optimizers.SGD(0.1), loss, metrics=[metric])
    by_hand = float(loss(s.y, s.model.predict(s.x, verbose=0)))
    return by_hand, _fit(s, 2), keras.ops.convert_to_numpy(loss.call(s.y, s.y + 1)), loss.dtype


@door("distribution.distribution", "distribution.set_distribution", "distribution.list_devices")
@door("distribution.get_device_count")
def current_distribution(s: Stage) -> Any:
    held = keras.distribution.distribution()
    keras.distribution.set_distribution(held)
    assert len(keras.distribution.list_devices()) == keras.distribution.get_device_count()
    return _fit(s), weights(s.model)


@door("distribution.DeviceMesh", "distribution.LayoutMap", "distribution.TensorLayout")
def layout_map(s: Stage) -> Any:
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*o/kernel"] = keras.distribution.TensorLayout((None, None), mesh)
    layouts[".*h/kernel"] = (None, "model")
    return list(layouts), layouts["door/h/kernel"].axes


@door("distribution.distribute_tensor")
def distribute_tensor(s: Stage) -> Any:
    if s.distribution is None or keras.distribution.distribution() is None:
        return s.x  # without any distribution it is Keras's own, which has one on JAX only
    ranks = s.distribution.placement
    mesh = keras.distribution.DeviceMesh(ranks.hierarchy, ranks.axis_names, keras.distribution.list_devices())
    layout = keras.distribution.TensorLayout((None, None), mesh)
    return keras.ops.convert_to_numpy(keras.distribution.distribute_tensor(keras.ops.convert_to_tensor(s.x), layout))
