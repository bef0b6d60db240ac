"""What part of the batch's loss a micro-batch's is, so that the gradients of all add up to those of the batch.

A loss is a sum over rows, divided by a number: of rows, of entries that a mask leaves, or the sum of weights. A
micro-batch's loss is divided by its own number; times `own / whole` it is its share. Of 13 rows in parts of 4, 3, 3 and
3 the shares are 4/13, 3/13, 3/13 and 3/13. They are known before the first backward pass, since they depend on
targets, weights and masks only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from keras_flow.errors import FlowError


def dtype() -> str:
    """The dtype in which losses, their shares and norms are added up: that of Keras's floats, float32 at least."""
    return keras.backend.result_type("float32", keras.config.floatx())


def shares(model: keras.Model, batch: tuple[Any, Any], outputs: Any, parts: Sequence[slice]) -> np.ndarray:
    """Return the share of each micro-batch in each loss, [micro-batches, losses], float64.

    Args:
        model: compiled, and its loss built.
        batch: targets and sample weights of the whole batch, host arrays; None for no weights.
        outputs: as the model gives them, with an `OutputMask` in the place of each.
        parts: the rows of each micro-batch.
    """
    divisors = [
        _divisor(loss, target, weight, output.mask)
        for loss, (target, output, weight) in given_to_losses(model._compile_loss, *batch, outputs)  # type: ignore[attr-defined]
    ]
    # a sum is divided by nothing: each part counts whole
    own = np.array([[np.nan if divisor is None else divisor(part) for divisor in divisors] for part in parts])
    whole = own.sum(0)
    # a loss of which nothing is left, as under a mask of zeros, is 0 in Keras as well
    found = np.divide(own, whole, out=np.zeros_like(own), where=whole != 0)
    return np.where(np.isnan(own), 1.0, found)


def given_to_losses(compiled: Any, y: Any, weights: Any, outputs: Any) -> list[tuple[Any, tuple[Any, Any, Any]]]:
    """Each loss with the target, the output and the sample weights that Keras gives it.

    Keras finds them by names, by order, or by the losses that are not None. So its own code is run, on a copy whose
    losses note what they get.

    Args:
        compiled: Keras's compiled loss, built.
        y: targets, in the structure of the program.
        weights: sample weights likewise, or None.
        outputs: in the structure of the model's outputs, something that stands for each.
    """
    found: list[tuple[Any, tuple[Any, Any, Any]]] = []

    def noting(loss: Any) -> Callable[..., float]:
        def note(*given: Any) -> float:
            found.append((loss, given))  # pyright: ignore[reportArgumentType]
            return 0.0

        return note

    losses = [each._replace(loss=noting(each.loss), loss_weights=None) for each in compiled._flat_losses]
    asked = _copy(compiled, _without_metrics(type(compiled)), _flat_losses=losses)
    asked.call(y, outputs, weights)
    return found


def _divisor(loss: Any, target: Any, weight: Any, mask: Any) -> Callable[[slice], float] | None:
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    ignored = getattr(loss, "ignore_class", None)
    if ignored is None:
        ignored = getattr(loss, "_fn_kwargs", {}).get("ignore_class")
    if reduction == "sum":
        return None
    if reduction in (None, "none"):
        raise FlowError(f"loss {getattr(loss, 'name', loss)!r} has reduction=None, of which a step has no one number")

    def valid(part: slice) -> np.ndarray | None:
        kept = None if mask is None else np.asarray(mask)[part].astype(bool)
        if ignored is not None:
            counted = np.asarray(target)[part] != ignored
            if kept is None:
                return counted
            counted = counted.reshape(counted.shape + (1,) * (kept.ndim - counted.ndim))
            return kept.reshape(kept.shape + (1,) * (counted.ndim - kept.ndim)) & counted
        return kept

    def number(part: slice) -> float:
        kept = valid(part)
        if reduction == "mean_with_sample_weight" and (weight is not None or kept is not None):
            own = np.ones(1) if weight is None else np.asarray(weight, np.float64)[part]
            if kept is None:
                return float(own.sum())
            while own.ndim > kept.ndim and own.shape[-1] == 1:
                own = own[..., 0]
            own = own.reshape(own.shape + (1,) * (kept.ndim - own.ndim))
            return float((own * kept).sum())
        if kept is not None:
            return float(kept.sum())
        return float(part.stop - part.start)

    return number


@contextmanager
def weighed(model: Any, own: Any, is_whole: bool) -> Iterator[None]:
    """Inside, each compiled loss is multiplied by its share, and has a value for each row.

    The shares go where `loss_weights` are: a loss sees the predictions as the model made them (TensorFlow asks a
    softmax for its logits).

    Args:
        model: compiled.
        own: the shares of this micro-batch, [losses].
        is_whole: whether the batch has no other rows, so that a loss may give one number for all.
    """
    compiled = model._compile_loss
    before = compiled._flat_losses
    compiled._flat_losses = [
        each._replace(
            loss=each.loss if is_whole else _with_rows(each.loss),
            loss_weights=own[number] if each.loss_weights is None else own[number] * each.loss_weights,
        )
        for number, each in enumerate(before)
    ]
    try:
        yield
    finally:
        compiled._flat_losses = before


def _with_rows(loss: Any) -> Any:
    """A copy of a loss that raises where the loss gives one number for all rows."""

    def call(y_true: Any, y_pred: Any) -> Any:
        values = loss.call(y_true, y_pred)
        if not values.shape:
            raise FlowError(
                f"loss {loss.name!r} returns one number for the rows that it is given, which are a part of a batch: "
                "nothing says how the numbers of all parts make that of the batch. Return a value for each row, "
                "[rows], of which Keras takes the mean"
            )
        return values

    return _copy(loss, type(loss), call=call)


def _copy(thing: Any, kind: type, **changed: Any) -> Any:
    """A copy of a Keras object with other attributes: `copy.copy` would write and read its configuration."""
    copied = object.__new__(kind)
    copied.__dict__.update(vars(thing), **changed)
    return copied


@functools.cache
def _without_metrics(kind: type) -> type:
    """The class of compiled losses without the metrics that keep the loss of each output."""
    return type(kind.__name__, (kind,), {"metrics": property(lambda compiled: [None] * len(compiled._flat_losses))})
