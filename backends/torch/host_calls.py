"""Python functions called in the middle of a step, on torch: the step is Python, and just calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def dense(gradient: Any) -> Any:
    """The gradient as a tensor without holes: that of a sparse embedding has some."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def call_in_step(function: Callable[[list[Any]], list[Any]], values: Sequence[Any]) -> list[Any]:
    """Call a function of tensors in a step; it returns tensors of the same dtypes and shapes."""
    return function(list(values))
