"""Objects of Keras with state, made somewhere and first used somewhere else: every combination against one device.

A case is a kind of object, the place where it is made, and the call that uses it first. Its program runs twice in one
process: without a distribution, and within a scope.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf

Results = dict[str, np.ndarray]

RANDOM = np.random.default_rng(0)
#: 22 rows in batches of 8: the last six divide by no number of ranks here
X, Y = RANDOM.standard_normal((22, 6)).astype("float32"), RANDOM.standard_normal((22, 4)).astype("float32")
LAYOUTS = ("data", "2x2")


@dataclass(frozen=True)
class Case:
    """What is made, where, and what uses it first."""

    kind: str
    made: str
    use: str
    layout: str = "data"

    def __str__(self) -> str:
        return f"{self.kind}, made {self.made}, used by {self.use}, {self.layout}"


# ---- kinds of objects: what is made, and the model that uses it


def _layers(*inside: keras.Layer) -> list[Any]:
    return [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="tanh", name="hidden", kernel_initializer="ones"),
        *inside,
        keras.layers.Dense(4, name="out", kernel_initializer=keras.initializers.GlorotUniform(seed=3)),
    ]


def _compiled(model: keras.Model, **options: Any) -> keras.Model:
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **options})
    return model


@keras.saving.register_keras_serializable("doors")
class WeightedLoss(keras.losses.Loss):
    """A loss with a variable."""

    def __init__(self, name: str = "weighted", reduction: str = "sum_over_batch_size", dtype: Any = None):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.weight = keras.Variable(np.array([1.0, 2.0, 3.0, 0.5], "float32"), name="weight", trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_true - y_pred) * self.weight, axis=-1)


class OwnStep(keras.Model):
    """A `train_step` and a `test_step` that update a metric which no attribute of the model holds."""

    def __init__(self, metric: keras.Metric, **options: Any):
        super().__init__(**options)
        type(self)._metric = staticmethod(lambda: metric)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        type(self)._metric().update_state(y, y_pred)
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "own": type(self)._metric().result()}


class Watching(keras.callbacks.Callback):
    """A callback with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = keras.metrics.MeanSquaredError()
        self.seen: list[float] = []

    def look(self) -> None:
        self.metric.update_state(Y, self.model.predict(X, batch_size=8, verbose=0))
        self.seen.append(float(self.metric.result()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.look()

    on_test_end = lambda self, logs=None: self.look() if logs is not None else None  # noqa: E731


class Scaled(keras.Layer):
    """A layer whose call finds a variable that it does not track."""

    def __init__(self, scale: keras.Variable):
        super().__init__(name="scaled")
        self.find = lambda: scale

    def call(self, inputs: Any) -> Any:
        return inputs * self.find()


class Noisy(keras.Layer):
    """A layer that draws by a generator made elsewhere."""

    def __init__(self, seed: keras.random.SeedGenerator):
        super().__init__(name="noisy")
        self.generators = {"noise": seed}

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal((8,), seed=self.generators["noise"])


def _dense() -> keras.Layer:
    layer = keras.layers.Dense(8, name="inner", kernel_initializer=keras.initializers.GlorotUniform(seed=5))
    layer.build((None, 8))
    return layer


def _normalization() -> keras.Layer:
    layer = keras.layers.BatchNormalization(name="inner")
    layer.build((None, 8))
    return layer


def _with_optimizer(optimizer: keras.Optimizer) -> keras.Model:
    model = _compiled(keras.Sequential(_layers(), name="model"), optimizer=optimizer)
    optimizer.build(model.trainable_variables)
    return model


#: kind -> what makes the object, and what makes a compiled model that uses it; None: the object is the model
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], keras.Model] | None]] = {
    "metric": (
        lambda: keras.metrics.MeanAbsoluteError(name="mae"),
        lambda metric: _compiled(keras.Sequential(_layers()), metrics=[metric]),
    ),
    "weighted metrics": (
        lambda: [keras.metrics.CosineSimilarity(name="cos"), keras.metrics.R2Score(name="r2")],
        lambda metrics: _compiled(keras.Sequential(_layers()), weighted_metrics=metrics),
    ),
    "metric in a closure": (
        lambda: keras.metrics.MeanAbsoluteError(name="mae"),
        lambda metric: _compiled(_own_step(metric)),
    ),
    "loss": (WeightedLoss, lambda loss: _compiled(keras.Sequential(_layers()), loss=loss)),
    "optimizer": (lambda: _with_optimizer(keras.optimizers.SGD(0.1, momentum=0.9)), None),
    "EMA": (lambda: _with_optimizer(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)), None),
    "loss scale": (
        lambda: _with_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)),
        None,
    ),
    "seed generator": (
        lambda: keras.random.SeedGenerator(11),
        lambda seed: _compiled(keras.Sequential(_layers(Noisy(seed)))),
    ),
    "layer": (_dense, lambda layer: _compiled(keras.Sequential(_layers(layer)))),
    "statistics": (_normalization, lambda layer: _compiled(keras.Sequential(_layers(layer)))),
    "variable": (
        lambda: keras.Variable(np.linspace(0.5, 1.5, 8, dtype="float32"), trainable=False, name="scale"),
        lambda scale: _compiled(keras.Sequential(_layers(Scaled(scale)))),
    ),
    "callback": (Watching, lambda _: _compiled(keras.Sequential(_layers()))),
    "model": (
        lambda: _compiled(keras.Sequential(_layers()), metrics=[keras.metrics.MeanAbsoluteError(name="mae")]),
        None,
    ),
}


def _own_step(metric: keras.Metric) -> keras.Model:
    inner = keras.Sequential(_layers())
    return type("OwnStep", (OwnStep,), {})(metric, inputs=inner.inputs, outputs=inner.outputs)


# ---- where it is made


def _trained(kind: str, made: Any) -> Any:
    """The object after an epoch of a model that uses it."""
    with_it = KINDS[kind][1]
    model = made if with_it is None else with_it(made)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=_callbacks(made))
    return made


def _callbacks(made: Any) -> list[keras.callbacks.Callback]:
    return [made] if isinstance(made, keras.callbacks.Callback) else []


def _loaded(made: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"model{kf.env.process_index()}.keras")
        made.save(path)
        return keras.models.load_model(path)


MADE = ("before", "in the scope", "under another", "in a plain fit", "loaded", "unpickled", "copied")


def _make(case: Case, other: AbstractContextManager[Any]) -> Any:
    make = KINDS[case.kind][0]
    if case.made == "under another":
        with other:
            return _trained(case.kind, make())
    made = make()
    if case.made == "in a plain fit":
        return _trained(case.kind, made)
    if case.made == "loaded":
        return _loaded(made)
    if case.made == "unpickled":
        return pickle.loads(pickle.dumps(made))
    return copy.deepcopy(made) if case.made == "copied" else made


# ---- what uses it first


def _fit(model: keras.Model, made: Any) -> Results:
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=_callbacks(made)).history


def _evaluate(model: keras.Model, made: Any) -> Results:
    return model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True, callbacks=_callbacks(made))


def _train_on_batch(model: keras.Model, made: Any) -> Results:
    logs = [model.train_on_batch(X[rows], Y[rows], return_dict=True) for rows in (slice(0, 8), slice(8, 14))]
    return {f"{name} {step}": value for step, log in enumerate(logs) for name, value in log.items()}


def _validation(model: keras.Model, made: Any) -> Results:
    options: Any = {"validation_data": (X, Y), "validation_freq": 2, "callbacks": _callbacks(made)}
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options).history


def _loop(model: keras.Model, made: Any) -> Results:
    """A program's own loop: calls of the model, a metric, an update by given gradients."""
    metrics = [made] if isinstance(made, keras.Metric) else [keras.metrics.MeanAbsoluteError()]
    for metric in metrics:
        metric.reset_state()
    found = []
    for rows in (slice(0, 8), slice(8, 14)):
        outputs = model(X[rows], training=False)
        for metric in metrics:
            metric.update_state(Y[rows], outputs)
        found.append(float(keras.ops.convert_to_numpy(metrics[0].result())))
        weights = model.trainable_variables
        gradients = [np.full(weight.shape, 0.01 * (index + 1), "float32") for index, weight in enumerate(weights)]
        model.optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients], weights)
    return {"metric": np.array(found)}


USES: dict[str, Callable[[keras.Model, Any], Results]] = {
    "fit": _fit,
    "evaluate": _evaluate,
    "train_on_batch": _train_on_batch,
    "validation": _validation,
    "a loop": _loop,
}


# ---- one case


def _run(case: Case, scope: Callable[[], AbstractContextManager[Any]], other: AbstractContextManager[Any]) -> Results:
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    is_inside = case.made == "in the scope"
    made = None if is_inside else _make(case, other)
    with scope():
        made = _make(case, other) if is_inside else made
        with_it = KINDS[case.kind][1]
        model = made if with_it is None else with_it(made)
        results = {name: np.asarray(value, "float64") for name, value in USES[case.use](model, made).items()}
        if isinstance(made, Watching):
            results["seen"] = np.array(made.seen)
        for index, weight in enumerate(model.get_weights()):
            results[f"weight {index}"] = np.asarray(weight, "float64")
    return results


def _scope(layout: str) -> AbstractContextManager[Any]:
    ranks = kf.env.get_world_size()
    if layout == "data":
        return kf.DataParallel().scope()
    shape = np.arange(ranks).reshape(ranks // 2, 2)
    rules = {"hidden/kernel$": {"model": kf.sbp.split(1)}, "hidden/bias$": {"model": kf.sbp.split(0)}}
    return kf.ModelParallel(kf.Placement(shape, axis_names=("data", "model")), batch_axes="data", rules=rules).scope()


@contextlib.contextmanager
def _other(layout: str) -> Iterator[None]:
    """The ranks in another order, rows split otherwise."""
    ranks = list(reversed(range(kf.env.get_world_size())))
    with kf.DataParallel(kf.Placement(ranks, axis_names=("rows",))).scope():
        yield


@functools.cache
def _reference(kind: str, made: str, use: str) -> Results:
    return _run(Case(kind, made, use), contextlib.nullcontext, contextlib.nullcontext())


def deviations(cases: Sequence[Case]) -> dict[str, str]:
    """Case -> how it differs from one device; those that are equal are left out. Runs on every rank."""
    found = {}
    for case in cases:
        expected = _reference(case.kind, case.made, case.use)
        try:
            got = _run(case, functools.partial(_scope, case.layout), _other(case.layout))
        except Exception:
            found[str(case)] = traceback.format_exc(limit=-3)
            continue
        assert expected.keys() == got.keys(), case
        for name, value in expected.items():
            if not np.allclose(got[name], value, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(value).max()))):
                found[str(case)] = f"{name}: {got[name].tolist()} where one device has {value.tolist()}"
                break
    keras.utils.clear_session()
    return found


def _is_possible(kind: str, made: str, use: str) -> bool:
    """Whether one device can do it: files hold models, pickles need a configuration, a loop has no callbacks."""
    if made == "loaded" and KINDS[kind][1] is not None:
        return False
    if made in ("unpickled", "copied") and kind in ("seed generator", "variable", "callback", "metric in a closure"):
        return False
    return kind != "callback" or use in ("fit", "validation")


def is_possible_on_jax(case: Case) -> bool:
    """Whether one device of JAX can do it, where those of the other engines can."""
    # after a `fit` a weight and its average are one buffer, which `train_on_batch` donates twice
    if case.kind == "EMA" and case.made in ("in a plain fit", "under another") and case.use == "train_on_batch":
        return False
    # UnexpectedTracerError where a loss scale's `apply` is called as it is
    return case.kind != "loss scale" or case.use != "a loop"


def cases() -> list[Case]:
    """All cases of torch and TensorFlow, in an order that does not change."""
    return [
        Case(kind, made, use, layout)
        for kind, made, use, layout in itertools.product(KINDS, MADE, USES, LAYOUTS)
        if _is_possible(kind, made, use)
    ]
