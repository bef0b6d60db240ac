"""Does a loss have a value for each row, and is a metric's state a sum over rows? Otherwise rows interact in it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

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
        return _by_axis("loss", loss, None, "", rank)
    # an object's function may be another than its class's
    function = getattr(loss, "fn", None) if isinstance(loss, keras.Loss) else loss
    name = _loss_of_function(function)
    if not name and own_code.is_keras(function):
        name = type(loss).__name__ if isinstance(loss, keras.Loss) else function.__name__  # type: ignore[union-attr]
    return _by_axis("loss", loss, function, name, rank)


def of_metric(metric: keras.Metric, rank: int) -> Interaction | None:
    """The interaction of rows in one of `keras.metrics`, for predictions of so many dims.

    None: its state is a sum over rows.
    """
    if getattr(type(metric), ADDS_ROWS, False):
        return None
    function, name = getattr(metric, "_fn", None), type(metric).__name__
    if not _is_of_keras(metric, "metrics") or not (function is None or own_code.is_keras(function)):
        name = ""
    elif type(metric) is keras.metrics.MeanMetricWrapper:
        name = _mean_of(function)
    return _by_axis("metric", metric, function, name, rank)


def of_compiled(model: keras.Model, kind: Literal["loss", "metric"], rank: int) -> list[Interaction]:
    """The interactions in the losses or the metrics of a compiled model, for predictions of so many dims."""
    of_kind = _of_compiled_losses if kind == "loss" else _of_compiled_metrics
    return [interaction for interaction in of_kind(model, rank) if interaction is not None]


def _of_compiled_losses(model: Any, rank: int) -> Iterator[Interaction | None]:
    compiled = getattr(model, "_compile_loss", None)
    if compiled is not None and compiled.built:
        yield from (of_loss(each.loss, rank) for each in compiled._flat_losses)
        return
    for leaf in tree.flatten(getattr(compiled, "_user_loss", None)):
        # Keras chooses these by the shape of the targets; each has a value for each row
        if leaf is not None and leaf not in ("crossentropy", "ce"):
            yield of_loss(keras.losses.get(leaf), rank)


def _of_compiled_metrics(model: Any, rank: int) -> Iterator[Interaction | None]:
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is not None and compiled.built:
        yield from (of_metric(metric, rank) for metric in compiled.metrics)
        return
    given = [getattr(compiled, name, None) for name in ("_user_metrics", "_user_weighted_metrics")]
    for leaf in tree.flatten(given):
        if isinstance(leaf, keras.Metric):
            yield of_metric(leaf, rank)
        # those that have a name are all in the table; Keras makes objects of them, with variables, by the first batch
        elif leaf is not None and not isinstance(leaf, str):
            yield _by_axis("metric", leaf, leaf, _mean_of(leaf), rank)


def _is_of_keras(thing: keras.Loss | keras.Metric, kind: str) -> bool:
    """Whether a loss or a metric is one of Keras's, and computes Keras's own code."""
    look = looks.last(thing)
    if look is None or not look.is_of(thing):
        look = _OwnCodeLook.at(thing)
        look.is_keras = keras_places.is_of_keras(type(thing), kind) and not own_code.replaced_method(thing)
    return look.is_keras


def _loss_of_function(function: object) -> str:
    """The name of the class of `keras.losses` whose function this is; empty where it is none's."""
    return next((name for known, name in _LOSSES_OF_FUNCTIONS if known is function), "")


def _mean_of(function: object) -> str:
    """The name in the tables by which a function is judged that Keras takes as a metric; or empty."""
    if not own_code.is_keras(function):
        return ""
    # Keras gives some of its losses as metrics too, and has functions that are metrics alone
    is_metric = any(known is function for known in vars(keras.metrics).values())
    return _loss_of_function(function) or ("MeanMetricWrapper" if is_metric else function.__name__)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def _usual_axis(function: Callable[..., object]) -> object:
    """The axis along which one of Keras's functions reduces where a call names none."""
    axis = inspect.signature(function).parameters.get("axis")
    return -1 if axis is None else axis.default


def _by_axis(kind: str, found: object, function: Any, name: str, rank: int) -> Interaction | None:
    """The interaction in a loss or a metric of that name in Keras, from the axis along which it reduces."""
    text = f"{kind} {getattr(found, 'name', getattr(found, '__name__', name))!r}"
    if name not in _LOSSES and (kind == "loss" or name not in _METRICS):
        return Interaction("own code" if not name else "unknown", f"{text} is not known to add up rows")
    named = getattr(found, "_fn_kwargs", {})
    axis = getattr(found, "axis", named["axis"] if "axis" in named else _usual_axis(function) if function else -1)
    if name in ("F1Score", "FBetaScore"):
        axis = -1  # theirs is that of the sum over rows, which is their state
    # without an axis Dice and Tversky reduce all dims; and the last dim of a vector is that of its rows
    if axis is None or rank < 2 or touches_rows(axis, rank):
        return Interaction("along rows", f"{text} works along dimension 0")
    return None
