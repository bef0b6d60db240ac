"""Calls of a model without values, by shapes alone: whether it takes the data that it is given.

Loads Keras where it is used, and not before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

#: words of Keras for an input of another shape, or for another number of inputs, than a layer takes
_MISFIT = re.compile(
    r".*(?:incompatible with the layer|Invalid input shape|[Ee]xpect\w* \d+ (?:named )?input|[Mm]issing data for input"
    r").*"
)
#: words of `refused_targets`
_TARGETS = "targets that the loss does not take"
#: how Keras colours its errors
COLOURS = re.compile(r"\x1b\[\d*m")
#: what they say of a tensor that has no name and no value
_TRACED = re.compile(r" with name 'None'| \w*Tracer\([^)]*\)| and path ''")


def misfit(error: BaseException) -> str | None:
    """The line of an error that says what a layer, or a loss, does not take; None for an error about another thing.

    Example:
        >>> misfit(ValueError("Exception encountered. Input 0 is incompatible with the layer: axis -1 is 8"))
        'Exception encountered. Input 0 is incompatible with the layer: axis -1 is 8'
        >>> misfit(ValueError("no such file"))
    """
    if isinstance(error, FlowError):
        return str(error) if _TARGETS in str(error) else None
    found = _MISFIT.search(COLOURS.sub("", str(error))) if isinstance(error, ValueError) else None
    return _TRACED.sub("", found[0]).strip() if found else None


def have_shapes(data: object) -> bool:
    """Whether all of a structure are arrays, with a shape and a dtype."""
    from keras import tree

    return all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in tree.flatten(data))


def tensors(data: object, model: keras.Model) -> object:
    """Arrays as tensors without values, of as many rows as the model has, if it says how many."""
    import keras

    said = [tensor.shape[0] for tensor in getattr(model, "inputs", None) or () if tensor.shape]

    def symbol(leaf: Any) -> keras.KerasTensor:
        rows = next(filter(None, said), None) or max(2, len(leaf))  # a dim of length 1 would broadcast
        return keras.KerasTensor((rows, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype))

    return keras.tree.map_structure(symbol, data)


def outputs(model: keras.Model, x: object) -> object:
    """The outputs of a model for arrays, without values.

    Raises:
        ValueError: the model does not take them (`misfit`), or cannot be called without values.
    """
    from keras_flow.current.keras_places import compute_output_spec

    return compute_output_spec(model, tensors(x, model), training=False)


def refused_targets(model: keras.Model, y: object, computed: object) -> str | None:
    """Say why the model's loss refuses targets of such shapes; None where it takes them, or where that needs values.

    Args:
        model: a compiled model.
        y: the targets, arrays.
        computed: the model's outputs without values (`outputs`).
    """
    from keras_flow.current.keras_places import compute_output_spec

    # a class of the user's own may do with targets what it likes
    if not type(model).__module__.startswith("keras."):
        return None
    try:
        compute_output_spec(lambda y, out: model.compute_loss(y=y, y_pred=out), tensors(y, model), computed)
    except (ValueError, TypeError, RuntimeError) as error:
        text = COLOURS.sub("", str(error)).strip().partition("\n")[0]
        if "shape" in text or "size of tensor" in text:  # the second are torch's words
            return (
                f"targets that the loss does not take: y has the shape {shapes(y)}, the model's output "
                f"{shapes(computed)}. {text}"
            )
    except Exception:  # it needs values
        return None
    return None


def shapes(data: object) -> str:
    """The shapes of the tensors in a structure, in words."""
    from keras import tree

    return " and ".join(str(tuple(leaf.shape)) for leaf in tree.flatten(data))


def require_fit(model: keras.Model, x: object, y: object) -> None:
    """Raise an error where a model does not take arrays. What cannot be known without values passes.

    Args:
        model: the model.
        x: rows.
        y: their targets; None where a loss is not to be asked.

    Raises:
        ValueError: it does not take the rows: Keras's own error.
        FlowError: its loss does not take the targets.
    """
    if x is None or not have_shapes(x):
        return
    try:
        computed = outputs(model, x)
    except Exception as error:
        if misfit(error) is not None:
            raise
        return
    if y is not None and have_shapes(y):
        text = refused_targets(model, y, computed)
        if text:
            raise FlowError(f"fit was given {text}")
