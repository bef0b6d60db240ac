"""A traced function for each set of a model's weights: what is traced goes on with those of its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def traced_by_weights(model: keras.Model, make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Return `make`, whose functions are made anew where other weights of the model are trained, or it has others.

    Args:
        model: the model.
        make: makes a function that is traced when it is first called.

    Example: a layer is frozen between two steps, and trained again. The third step has the function of the first.
    """

    def made(*args: Any) -> Callable[..., Any]:
        # with the variables, so that their ids stay their own
        functions: dict[object, tuple[list[keras.Variable], Callable[..., Any]]] = {}

        def step(*tensors: Any) -> Any:
            variables = model.variables
            key = tuple(map(id, model.trainable_weights)), tuple(map(id, variables))
            if key not in functions:
                functions[key] = variables, make(*args)
            return functions[key][1](*tensors)

        return step

    return made
