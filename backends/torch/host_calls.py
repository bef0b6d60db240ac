"""Python functions called in the middle of a step, on torch: the step is Python, and just calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_flow.backends.torch import collectives


def dense(gradient: Any) -> Any:
    """The gradient as a tensor without holes: that of a sparse embedding has some."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def call_in_step(
    function: Callable[[list[Any]], list[Any]],
    values: Sequence[Any],
    pullback: Callable[[list[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Call a function of tensors in a step; it returns tensors of the same dtypes and shapes."""
    if pullback is None or not collectives.is_recorded(values):
        return function(list(values))
    return collectives.with_gradient(
        lambda given: function(list(given)), lambda cotangents: pullback(list(cotangents)), values
    )
