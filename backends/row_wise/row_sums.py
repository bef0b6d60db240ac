"""Does a loss have a value for each row, and is a metric's state a sum over rows? Otherwise rows interact in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import keras
from keras import tree

from keras_flow.backends.row_wise import looks, own_code
from keras_flow.backends.row_wise.row_operations import Interaction, touches_rows
from keras_flow.current import keras_places

#: losses with a value for each row; not Circle, which compares rows
_LOSSES = frozenset(
    """BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy CategoricalFocalCrossentropy
    CategoricalGeneralizedCrossEntropy CategoricalHinge CosineSimilarity Dice Hinge Huber KLDivergence LogCosh
    MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    SparseCategoricalCrossentropy SquaredHinge Tversky""".split()
)
#: functions that Keras wraps as losses (`loss="mse"`), each with the class of which it is the function
_LOSSES_OF_FUNCTIONS = [(getattr(keras.losses, name)().fn, name) for name in sorted(_LOSSES)]
#: metrics whose state is a sum over rows
_METRICS = frozenset(
    """AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy CategoricalCrossentropy
    CategoricalHinge ConcordanceCorrelation CosineSimilarity F1Score FBetaScore FalseNegatives FalsePositives Hinge IoU
    KLDivergence LogCoshError MeanAbsoluteError MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanSquaredError
    MeanSquaredLogarithmicError OneHotIoU OneHotMeanIoU PearsonCorrelation Poisson Precision PrecisionAtRecall R2Score
    Recall RecallAtPrecision RootMeanSquaredError SensitivityAtSpecificity SparseCategoricalAccuracy
    SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy SpecificityAtSensitivity SquaredHinge
    TopKCategoricalAccuracy TrueNegatives TruePositives""".split()
)


#: by this name a class of keras_flow's own losses and metrics says that it adds up rows
ADDS_ROWS = "keras_flow_adds_rows"


@dataclass(eq=False)
class _OwnCodeLook(looks.Look):
    """A look at a loss or a metric, with the judgement: whether it computes with Keras's own code."""

    is_keras: bool = False


def of_loss(loss: object, rank: int) -> Interaction | None:
    """The interaction of rows in a loss (an object, or a function) for predictions of so many dims.

    None: it has a value for each row.
    """
    if getattr(type(loss), ADDS_ROWS, False):
        return None
    if isinstance(loss, keras.Loss) and not _is_of_keras(loss, "losses"):
        return _by_axis("loss", loss, "", rank)
    # an object's function may be another than its class's
    function = getattr(loss, "fn", None) if isinstance(loss, keras.Loss) else loss
    name = next((name for known, name in _LOSSES_OF_FUNCTIONS if known is function), "")
    if not name and isinstance(loss, keras.Loss) and own_code.is_keras(function):
        name = type(loss).__name__
    return _by_axis("loss", loss, name, rank)


def of_metric(metric: keras.Metric, rank: int) -> Interaction | None:
    """The interaction of rows in one of `keras.metrics`, for predictions of so many dims.

    None: its state is a sum over rows.
    """
    if getattr(type(metric), ADDS_ROWS, False):
        return None
    function = getattr(metric, "_fn", None)
    is_known = _is_of_keras(metric, "metrics") and (function is None or own_code.is_keras(function))
    return _by_axis("metric", metric, type(metric).__name__ if is_known else "", rank)


def of_compiled(model: keras.Model, kind: Literal["loss", "metric"], rank: int) -> list[Interaction]:
    """The interactions in the losses or the metrics of a compiled model, for predictions of so many dims."""
    losses, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    # as `compile` was given them: Keras makes objects of names with the first batch
    given = (
        (getattr(losses, "_user_loss", None),)
        if kind == "loss"
        else (getattr(metrics, "_user_metrics", None), getattr(metrics, "_user_weighted_metrics", None))
    )
    found = []
    for leaf in tree.flatten(given):
        if leaf is None or isinstance(leaf, str):  # what has a name is Keras's own
            continue
        if kind == "loss":
            found.append(of_loss(leaf, rank))
        elif isinstance(leaf, keras.Metric):
            found.append(of_metric(leaf, rank))
        else:
            name = getattr(leaf, "__name__", str(leaf))
            found.append(Interaction("own code", f"metric {name!r} is not known to add up rows"))
    return [interaction for interaction in found if interaction is not None]


def _is_of_keras(thing: keras.Loss | keras.Metric, kind: str) -> bool:
    """Whether a loss or a metric is one of Keras's, and computes Keras's own code."""
    look = looks.last(thing)
    if look is None or not look.is_of(thing):
        look = _OwnCodeLook.at(thing)
        look.is_keras = keras_places.is_of_keras(type(thing), kind) and not own_code.replaced_method(thing)
    return look.is_keras


def _by_axis(kind: str, found: object, name: str, rank: int) -> Interaction | None:
    """The interaction in a loss or a metric of that name in Keras, from the axis along which it reduces."""
    text = f"{kind} {getattr(found, 'name', name)!r}"
    if name not in (_LOSSES if kind == "loss" else _METRICS):
        return Interaction("own code" if not name else "unknown", f"{text} is not known to add up rows")
    axis = getattr(found, "axis", getattr(found, "_fn_kwargs", {}).get("axis", -1))
    if name in ("F1Score", "FBetaScore"):
        axis = -1  # theirs is that of the sum over rows, which is their state
    # without an axis Dice and Tversky reduce all dims; and the last dim of a vector is that of its rows
    if axis is None or rank < 2 or touches_rows(axis, rank):
        return Interaction("along rows", f"{text} works along dimension 0")
    return None
