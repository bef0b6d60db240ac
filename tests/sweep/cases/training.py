"""Losses, metrics, optimizers, regularizers, constraints and initializers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import constraints, initializers, losses, metrics, ops, optimizers, regularizers
from keras import layers as L

from tests.sweep.piece import FEATURES, Apply, Measure, Piece

#: what a loss or metric reads: how predictions and targets [rows, columns] are made for it
_Reading = Callable[[Any], Any]


def _same(x: Any) -> Any:
    return x


def _above_zero(x: Any) -> Any:
    return ops.cast(x > 0, "float32")


def _signs(x: Any) -> Any:
    return ops.sign(x)


def _classes(x: Any) -> Any:
    return ops.argmax(x, axis=-1)


def _one_hot(x: Any) -> Any:
    return ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1])


def _positive(x: Any) -> Any:
    return ops.abs(x) + 1.0


#: what targets and predictions become, by the kind of what compares them
_KINDS: dict[str, tuple[_Reading, _Reading]] = {
    "numbers": (_same, _same),
    "positive": (_positive, _positive),
    "binary": (_above_zero, ops.sigmoid),
    "signs": (_signs, ops.tanh),
    "categories": (_one_hot, ops.softmax),
    "sparse": (_classes, ops.softmax),
    "distributions": (ops.softmax, ops.softmax),
    "labels": (_classes, _classes),
}
_LOSSES = {
    "numbers": "CosineSimilarity Huber LogCosh MeanAbsoluteError MeanSquaredError",
    "positive": "MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson",
    "binary": "BinaryCrossentropy BinaryFocalCrossentropy Dice Tversky",
    "signs": "Hinge SquaredHinge",
    "categories": "CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalHinge",
    "sparse": "CategoricalGeneralizedCrossEntropy SparseCategoricalCrossentropy Circle",
    "distributions": "KLDivergence",
}
_METRICS: dict[str, dict[str, dict[str, Any]]] = {
    "numbers": {
        "ConcordanceCorrelation": {},
        "CosineSimilarity": {},
        "LogCoshError": {},
        "MeanAbsoluteError": {},
        "MeanSquaredError": {},
        "PearsonCorrelation": {},
        "R2Score": {},
        "RootMeanSquaredError": {},
        "MeanMetricWrapper": {"fn": losses.mean_squared_error},
    },
    "positive": {"MeanAbsolutePercentageError": {}, "MeanSquaredLogarithmicError": {}, "Poisson": {}},
    "binary": {
        "AUC": {},
        "BinaryAccuracy": {},
        "BinaryCrossentropy": {},
        "FalseNegatives": {},
        "FalsePositives": {},
        "Precision": {},
        "PrecisionAtRecall": {"recall": 0.5},
        "Recall": {},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
        "TrueNegatives": {},
        "TruePositives": {},
        "F1Score": {"average": "macro"},
        "FBetaScore": {"average": "micro"},
        "BinaryIoU": {},
    },
    "signs": {"Hinge": {}, "SquaredHinge": {}},
    "categories": {
        "CategoricalAccuracy": {},
        "CategoricalCrossentropy": {},
        "CategoricalHinge": {},
        "OneHotIoU": {"num_classes": 4, "target_class_ids": [0, 1]},
        "OneHotMeanIoU": {"num_classes": 4},
        "TopKCategoricalAccuracy": {"k": 2},
    },
    "sparse": {
        "SparseCategoricalAccuracy": {},
        "SparseCategoricalCrossentropy": {},
        "SparseTopKCategoricalAccuracy": {"k": 2},
    },
    "distributions": {"KLDivergence": {}},
    "labels": {
        "Accuracy": {},
        "IoU": {"num_classes": 4, "target_class_ids": [0, 1]},
        "MeanIoU": {"num_classes": 4},
    },
}


def _loss(name: str, kind: str, reduction: str) -> Piece:
    target, prediction = _KINDS[kind]

    def applied(x: Any) -> Any:
        made = getattr(losses, name)(reduction=None if reduction == "rows" else reduction)
        value = made(ops.stop_gradient(target(ops.roll(x, 1, axis=-1))), prediction(x))
        return value if reduction != "rows" else ops.reshape(value, (-1, 1))

    by_rows = reduction == "rows"
    return Piece(f"losses.{name}[{reduction}]", lambda h: Apply(applied, reduces=not by_rows)(h))


def _losses() -> list[Piece]:
    whole = ("Dice", "Tversky")  # their mean over all is their definition
    return [
        _loss(name, kind, reduction)
        for kind, names in _LOSSES.items()
        for name in names.split()
        for reduction in ("sum_over_batch_size", "sum", "mean", "rows")
        if reduction == "sum_over_batch_size" or (reduction == "rows" and name not in whole) or name == "Huber"
    ]


def _metric(name: str, kind: str, options: dict[str, Any]) -> Piece:
    made = lambda: getattr(metrics, name)(**options)  # noqa: E731
    dense = lambda h: L.Dense(FEATURES)(h)  # noqa: E731
    return Piece(f"metrics.{name}", dense, metric=lambda: Measure(made(), *_KINDS[kind], name=name))


class _Spread(keras.metrics.Metric):
    """A metric of a user's own: the mean distance of rows from their mean, with sample weights."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(ops.abs(y_pred - ops.mean(y_pred, axis=0))))
        self.count.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

    def result(self) -> Any:
        return self.total / self.count


def _metrics() -> list[Piece]:
    means = {"Mean": keras.metrics.Mean, "Sum": keras.metrics.Sum}
    return [
        *(_metric(name, kind, options) for kind, own in _METRICS.items() for name, options in own.items()),
        Piece("metrics.Metric", lambda h: L.Dense(4)(h), metric=lambda: Measure(_Spread(), _same, _same, name="own")),
        *(
            Piece(
                f"metrics.{name}", lambda h: L.Dense(4)(h), metric=lambda cls=cls: Measure(cls(), None, _same, name="m")
            )
            for name, cls in means.items()
        ),
    ]


def _dense(name: str, **options: Callable[[], Any]) -> Piece:
    return Piece(name, lambda h: L.Dense(FEATURES, **{key: make() for key, make in options.items()})(h))


def _optimizer(name: str, make: Callable[[], Any]) -> Piece:
    connect = lambda h: L.Dense(FEATURES, activation="tanh")(h)  # noqa: E731
    return Piece(f"optimizers.{name}", connect, optimizer=make)


_RATE = 0.01
PIECES: tuple[Piece, ...] = (
    *_losses(),
    *_metrics(),
    *(_dense(f"regularizers.{n}", kernel_regularizer=lambda n=n: getattr(regularizers, n)(0.05)) for n in ("L1", "L2")),
    _dense(
        "regularizers.L1L2", kernel_regularizer=lambda: regularizers.L1L2(0.05, 0.02), bias_regularizer=lambda: "l2"
    ),
    _dense("regularizers.OrthogonalRegularizer", kernel_regularizer=lambda: regularizers.OrthogonalRegularizer(0.05)),
    _dense("constraints.MaxNorm", kernel_constraint=lambda: constraints.MaxNorm(0.5)),
    _dense("constraints.MinMaxNorm", kernel_constraint=lambda: constraints.MinMaxNorm(0.2, 0.5, axis=1)),
    _dense("constraints.NonNeg", kernel_constraint=lambda: constraints.NonNeg()),
    _dense("constraints.UnitNorm", kernel_constraint=lambda: constraints.UnitNorm()),
    *(
        _dense(f"initializers.{n}", kernel_initializer=lambda n=n: getattr(initializers, n)())
        for n in "GlorotNormal GlorotUniform HeNormal HeUniform Identity LecunNormal LecunUniform Ones Orthogonal "
        "RandomNormal RandomUniform TruncatedNormal VarianceScaling Zeros".split()
    ),
    _dense("initializers.Constant", kernel_initializer=lambda: initializers.Constant(0.1)),
    *(
        _optimizer(n, lambda n=n: getattr(optimizers, n)(_RATE))
        for n in (
            "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon Nadam RMSprop ScheduleFreeAdamW".split()
        )
    ),
    _optimizer("SGD", lambda: optimizers.SGD(_RATE, momentum=0.9, nesterov=True, clipnorm=0.5)),
    _optimizer("SGD[accumulated]", lambda: optimizers.SGD(_RATE, gradient_accumulation_steps=2, use_ema=True)),
    _optimizer("LossScaleOptimizer", lambda: optimizers.LossScaleOptimizer(optimizers.SGD(_RATE), initial_scale=8.0)),
)

WITHOUT = {
    "losses.CTC": "as ops.ctc_loss, of which it is the mean",
    "losses.Loss": "the base class",
    "optimizers.Optimizer": "the base class",
    "optimizers.OptimizerMap": "tells MultiOptimizer which variables are whose",
    "optimizers.MultiOptimizer": "made by OptimizerMap of the optimizers that have cases of their own",
    "regularizers.Regularizer": "the base class",
    "constraints.Constraint": "the base class",
    "initializers.Initializer": "the base class",
    "initializers.STFT": "for kernels of STFTSpectrogram, which has a case",
}
