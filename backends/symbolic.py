"""Calls of a model without values, by shapes alone: whether it takes the data that it is given.

Loads Keras where it is used, and not before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

#: words of Keras for an input of another shape, or for another number of inputs, than a layer takes
_MISFIT = re.compile(
    r".*(?:incompatible with the layer|Invalid input shape|[Ee]xpect\w* \d+ (?:named )?input|[Mm]issing data for input"
    r").*"
)
#: how Keras colours its errors
COLOURS = re.compile(r"\x1b\[\d*m")
#: what they say of a tensor that has no name and no value
_TRACED = re.compile(r" with name 'None'| \w*Tracer\([^)]*\)| and path ''")


def misfit(error: BaseException) -> str | None:
    """The line of an error of Keras that says what a layer does not take; None for an error about another thing.

    Example:
        >>> misfit(ValueError("Exception encountered. Input 0 is incompatible with the layer: axis -1 is 8"))
        'Exception encountered. Input 0 is incompatible with the layer: axis -1 is 8'
        >>> misfit(ValueError("no such file"))
    """
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


def require_fit(model: keras.Model, x: object) -> None:
    """Raise Keras's own error where a model does not take arrays. What cannot be known without values passes.

    Raises:
        ValueError: it does not take them.
    """
    if x is None or not have_shapes(x):
        return
    try:
        outputs(model, x)
    except Exception as error:
        if misfit(error) is not None:
            raise
