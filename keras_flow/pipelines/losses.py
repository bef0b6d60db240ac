"""What part of the batch's loss a micro-batch's is, so that the gradients of all add up to those of the batch.

A loss is a sum over rows, divided by a number: of rows, of entries that a mask leaves, or the sum of weights. A
micro-batch's loss is divided by its own number; times `own / whole` it is its share. Of 13 rows in parts of 4, 3, 3 and
3 the shares are 4/13, 3/13, 3/13 and 3/13. They are known before the first backward pass, since they depend on
targets, weights and masks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_flow.errors import FlowError


def shares(
    model: keras.Model,
    batch: tuple[Any, Any],
    masks: Sequence[Any],
    parts: Sequence[slice],
) -> np.ndarray:
    """Return the share of each micro-batch in each loss, [micro-batches, losses], float64.

    Args:
        model: compiled, and its loss built.
        batch: targets and sample weights of the whole batch, host arrays; None for no weights.
        masks: of each of the model's outputs, flat, the mask of the whole batch, or None.
        parts: the rows of each micro-batch.
    """
    divisors = _divisors(model, batch, masks)
    # a sum is divided by nothing: each part counts whole
    own = np.array([[np.nan if divisor is None else divisor(part) for divisor in divisors] for part in parts])
    whole = own.sum(0)
    # a loss of which nothing is left, as under a mask of zeros, is 0 in Keras as well
    found = np.divide(own, whole, out=np.zeros_like(own), where=whole != 0)
    return np.where(np.isnan(own), 1.0, found)


def _divisors(
    model: keras.Model, batch: tuple[Any, Any], masks: Sequence[Any]
) -> list[Callable[[slice], float] | None]:
    """For each loss what gives the number by which that of some rows is divided; None for a sum."""
    y, weights = batch
    flat_y, places = tree.flatten(y), _places(model)
    found: list[Callable[[slice], float] | None] = []
    for number, (loss, place) in enumerate(zip(_losses(model), places, strict=True)):
        mask = masks[place] if place < len(masks) else None
        weight = _at(weights, number, len(places))
        target = flat_y[number] if number < len(flat_y) else None
        found.append(_divisor(loss, target, weight, mask))
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

    copied = object.__new__(type(loss))  # `copy.copy` writes and reads a Keras object's file
    copied.__dict__.update(vars(loss), call=call)
    return copied


def with_ranks(model: Any) -> Iterator[tuple[Any, int]]:
    """Each loss of a compiled model, and the number of dims of the predictions that it reads."""
    for loss, place in zip(_losses(model), _places(model), strict=True):
        yield loss, len(model.outputs[place].shape)


def _losses(model: Any) -> list[Any]:
    return [each.loss for each in model._compile_loss._flat_losses]


def _places(model: Any) -> list[int]:
    """For each loss which of the model's outputs, flat, it reads."""
    structure = model._compile_loss._y_pred_build_structure
    numbered = tree.pack_sequence_as(structure, list(range(len(tree.flatten(structure)))))
    places = []
    for each in model._compile_loss._flat_losses:
        found = numbered
        for step in each.path:
            found = found[step]
        places.append(found)
    return places


def _at(structure: Any, number: int, count: int) -> Any:
    """The weights of a loss: its own of several, or those for all."""
    if structure is None or not tree.is_nested(structure):
        return structure
    flat = tree.flatten(structure)
    return flat[number] if len(flat) == count else flat[0]
