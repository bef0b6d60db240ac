"""`flow.optimizer` and `flow.losses`: schedules, and what minimizes a loss: Keras's optimizers."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_flow.compat.oneflow import tracing
from keras_flow.compat.oneflow.blobs import Blob, Reduced, apply, value_of
from keras_flow.compat.oneflow.missing import Names, listed
from keras_flow.errors import FlowError

ops: Any = keras.ops  # of which Keras's annotations say that results may be None

Factor = Any  # a function of the step
_decays = keras.optimizers.schedules


class RateOfStep(_decays.LearningRateSchedule):
    """A learning rate by the step.

    Args:
        rate: the rate of a step.
        base: at the end of a warm-up.
        warmup: its steps, and the factor of a step.
    """

    def __init__(self, rate: Factor, base: float = 0.0, warmup: tuple[int, Factor] | None = None) -> None:
        self._rate, self._base, self._warmup = rate, base, warmup

    def __call__(self, step: Any) -> Any:
        """The rate."""
        step = ops.cast(step, "float32")
        if self._warmup is None:
            return self._rate(step)
        steps, factor = self._warmup
        return ops.where(step < steps, self._base * factor(step), self._rate(step))

    def get_config(self) -> dict[str, Any]:
        """Raise: of a job its variables are saved.

        Raises:
            FlowError: always.
        """
        raise FlowError("a schedule of flow.optimizer has no config; flow.checkpoint.save saves variables")


def _piecewise(boundaries: Sequence[int], values: Sequence[float], warmup: Any = None) -> RateOfStep:
    if len(values) != len(boundaries) + 1:
        raise FlowError(f"PiecewiseConstantScheduler: {list(boundaries)} need one value more, got {list(values)}")

    def rate(step: Any) -> Any:
        found = 0.0 * step + values[0]
        for boundary, value in zip(boundaries, values[1:], strict=True):
            found = ops.where(step > boundary, value, found)
        return found

    return RateOfStep(rate, values[0], warmup)


def _scaled(base_lr: float, boundaries: Sequence[int], scale: Any, warmup: Any = None) -> RateOfStep:
    scales = [scale] * len(boundaries) if isinstance(scale, int | float) else scale
    return _piecewise(boundaries, [base_lr, *(base_lr * each for each in scales)], warmup)


def _decay(name: str, options: str, kind: Callable[..., Factor]) -> Callable[..., RateOfStep]:
    """OneFlow's scheduler of a schedule of Keras with the same arguments."""

    def scheduler(base_lr: float, steps: int, warmup: Any = None, **options: Any) -> RateOfStep:
        return RateOfStep(kind(base_lr, steps, **options), base_lr, warmup)

    return listed(f"optimizer.{name}", f"base_lr steps {options} warmup")(scheduler)


def _polynomial(base_lr: float, steps: int, cycle: bool = False, **options: Any) -> Factor:
    decay = _decays.PolynomialDecay(base_lr, steps, cycle=cycle, **options)
    return lambda step: decay(ops.maximum(step, 1.0) if cycle else step)  # OneFlow's first cycle begins so


def _natural(base_lr: float, steps: int, decay_rate: float, staircase: bool = False) -> Factor:
    return _decays.ExponentialDecay(base_lr, steps, math.exp(-decay_rate), staircase)


def uncorrected(rate: Factor, beta1: float, beta2: float) -> RateOfStep:
    """The rate with which Keras's Adam, which corrects its averages, makes the step of one that does not."""

    def undone(step: Any) -> Any:
        return rate(step) * (1.0 - ops.power(beta1, step + 1.0)) / ops.sqrt(1.0 - ops.power(beta2, step + 1.0))

    return RateOfStep(undone)


def _adam(rate: Factor, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, **options: Any) -> Any:
    is_corrected = options.pop("do_bias_correction", False)
    rate = rate if is_corrected else uncorrected(rate, beta1, beta2)
    return keras.optimizers.Adam(rate, beta1, beta2, epsilon, **options)


def _sgd(rate: Factor, momentum: float = 0.9, **options: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(rate, float(momentum), **options)


def _rmsprop(
    rate: Factor, decay_rate: float = 0.99, epsilon: float = 1e-8, centered: bool = False, **options: Any
) -> keras.Optimizer:
    return keras.optimizers.RMSprop(rate, decay_rate, epsilon=epsilon, centered=centered, **options)


class Minimizer:
    """Minimizes a job's loss by an optimizer of Keras."""

    def __init__(self, make: Callable[[], keras.Optimizer]) -> None:
        self._make = make

    def minimize(self, model_diff: Blob | Sequence[Blob]) -> None:
        """Minimize the mean of a loss, or the sum of the means of several, in a train job, by all trainable variables.

        Raises:
            FlowError: in a predict job, or a second time.
        """
        trace = tracing.current("flow.optimizer.minimize")
        several = model_diff if isinstance(model_diff, list | tuple) else [model_diff]
        first, *others = [value_of(each, "optimizer.minimize") for each in several]
        blob = functools.reduce(operator.add, map(_for_each_row, others), _for_each_row(first)) if others else first
        if not trace.is_training:
            raise FlowError(f'job {trace.job!r} minimizes a loss: write @flow.global_function(type="train")')
        if trace.minimized is not None:
            raise FlowError(f"job {trace.job!r} minimizes two losses; add them first")
        trace.minimized = (blob, self._make)


def _for_each_row(loss: Blob) -> Blob:
    """A loss whose mean is that of a loss, with a value for each row where it has rows."""
    if isinstance(loss, Reduced) and loss.name == "mean":
        loss = loss.of_rows
    others = tuple(range(1, len(loss.shape)))
    return loss if loss.rows is None or not others else apply(lambda x: ops.mean(x, others), loss)


def _minimizer(name: str, options: str, make: Callable[..., keras.Optimizer]) -> Callable[..., Minimizer]:
    def optimizer(lr_scheduler: Factor, grad_clipping: float | None = None, **options: Any) -> Minimizer:
        if not isinstance(lr_scheduler, _decays.LearningRateSchedule):
            raise FlowError(
                f"an optimizer takes a schedule, got {lr_scheduler!r}; for example "
                "flow.optimizer.PiecewiseConstantScheduler([], [0.1])"
            )
        if options.pop("loss_scale_factor", None) not in (None, 1):
            raise FlowError("loss_scale_factor: use keras.optimizers.LossScaleOptimizer, in a program of Keras")
        return Minimizer(lambda: make(lr_scheduler, global_clipnorm=grad_clipping, **options))

    others = "grad_clipping !train_step_lbn !loss_scale_policy !variables"
    return listed(f"optimizer.{name}", f"lr_scheduler {options} {others}")(optimizer)


_BY_RATE = "decay_rate staircase"
optimizer = Names(
    "optimizer",
    PiecewiseConstantScheduler=_piecewise,
    PiecewiseScalingScheduler=_scaled,
    CosineScheduler=_decay("CosineScheduler", "alpha", _decays.CosineDecay),
    PolynomialScheduler=_decay("PolynomialScheduler", "end_learning_rate power cycle", _polynomial),
    ExponentialScheduler=_decay("ExponentialScheduler", _BY_RATE, _decays.ExponentialDecay),
    InverseTimeScheduler=_decay("InverseTimeScheduler", _BY_RATE, _decays.InverseTimeDecay),
    NaturalExpScheduler=_decay("NaturalExpScheduler", _BY_RATE, _natural),
    warmup=Names(
        "optimizer.warmup",
        linear=lambda steps, start_multiplier: (
            steps,
            lambda step: start_multiplier + (1.0 - start_multiplier) * step / steps,
        ),
        constant=lambda steps, multiplier: (steps, lambda step: multiplier),
    ),
    grad_clipping=Names("optimizer.grad_clipping", by_global_norm=lambda clip_norm: float(clip_norm)),
    SGD=_minimizer("SGD", "loss_scale_factor momentum", _sgd),
    Adam=_minimizer("Adam", "beta1 beta2 epsilon do_bias_correction loss_scale_factor", _adam),
    RMSProp=_minimizer("RMSProp", "decay_rate epsilon centered loss_scale_factor", _rmsprop),
)


def _add_loss(loss: Blob) -> None:
    Minimizer(tracing.current("flow.losses.add_loss").make_optimizer).minimize(loss)


losses = Names("losses", add_loss=_add_loss)


class TrainConfig(Names):
    """`config.train`, as programs of OneFlow before 0.2 said how `flow.losses.add_loss` is minimized."""

    def __init__(self) -> None:
        super().__init__("function_config.train")
        self.rate: float | None = None
        self.update: Mapping[str, Mapping[str, Any]] = {"naive_conf": {}}

    def primary_lr(self, value: float) -> None:
        """Set the learning rate."""
        self.rate = value

    def model_update_conf(self, value: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the update: `{"naive_conf": {}}`, `{"momentum_conf": {"beta": 0.9}}`, `{"adam_conf": {}}`."""
        self.update = value

    def optimizer(self) -> keras.Optimizer:
        """Keras's optimizer of that.

        Raises:
            FlowError: there is no rate, or the update is of another kind.
        """
        (name, options), *others = self.update.items()
        if self.rate is None or others or name not in ("naive_conf", "momentum_conf", "adam_conf"):
            raise FlowError(
                "flow.losses.add_loss takes config.train.primary_lr(0.1) and model_update_conf of one of naive_conf, "
                f"momentum_conf and adam_conf, got {self.rate} and {list(self.update)}; flow.optimizer has schedules, "
                "warm-ups and clipping: flow.optimizer.SGD(...).minimize(loss)"
            )
        rate = _piecewise([], [self.rate])
        if name == "adam_conf":
            return _adam(rate, **options)
        return _sgd(rate, 0.0 if name == "naive_conf" else options.get("beta", 0.9))
