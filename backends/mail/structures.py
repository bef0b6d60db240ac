"""Structures of tensors, as JSON tells them to another process: lists, tuples and dicts, some leaves None.

Example: `{"p": [tensor, None]}` of float32 [2, 3] is

    {"dict": {"p": {"list": [{"tensor": ["float32", [2, 3]]}, {"tensor": null}]}}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras


def described(value: Any) -> dict[str, Any]:
    """Dtypes and shapes of a structure of tensors."""
    if isinstance(value, dict):
        return {"dict": {name: described(each) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [described(each) for each in value]}
    return {"tensor": None if value is None else [keras.backend.standardize_dtype(value.dtype), list(value.shape)]}


def leaves(value: Any) -> Iterator[Any]:
    """The tensors of a structure, in the order in which `made` makes them."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif value is not None:
        yield value


def made(told: dict[str, Any], make: Callable[[str, list[int]], Any]) -> Any:
    """A structure that was described, of what `make` gives for each dtype and shape."""
    ((kind, inner),) = told.items()
    if kind == "tensor":
        return None if inner is None else make(*inner)
    if kind == "dict":
        return {name: made(each, make) for name, each in inner.items()}
    return (tuple if kind == "tuple" else list)(made(each, make) for each in inner)
