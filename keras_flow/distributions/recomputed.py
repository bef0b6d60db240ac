"""Which layers of a model are computed again in the backward pass (`remat=`).

`"block"` means a model's repeated blocks: layers that have layers themselves, of a class and with weights of which the
model has two or more. Patterns name layers by path. Of layers within each other the outermost is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import keras

from keras_flow import near_names
from keras_flow.current import models
from keras_flow.errors import FlowError

BLOCKS = "block"


class Recomputed:
    """The layers that `remat=` of a distribution names.

    Attributes:
        layers: those that are computed again, of the models that were checked.

    Args:
        remat: as a user gave it.

    Raises:
        FlowError: it is another text than `"block"`, or has a pattern that is no regular expression.
    """

    def __init__(self, remat: str | Sequence[str] | None):
        self.layers = WeakSet[keras.Layer]()
        self._remat = checked(remat)
        # patterns that a model had a layer for: as with rules, a sub-model of it need not have them all
        self._matched: set[str] = set()

    def layers_of(self, model: keras.Model) -> list[keras.Layer]:
        """The layers of a built model that are computed again."""
        return [] if self._remat is None else layers_of(model, self._remat)[0]

    def check(self, model: keras.Model) -> list[str]:
        """Take the layers of a built model, and say what is wrong with the patterns."""
        if self._remat is None:
            return []
        found, of_none = layers_of(model, self._remat)
        self.layers.update(found)
        asked = [self._remat] if isinstance(self._remat, str) else self._remat
        self._matched.update(pattern for pattern in asked if pattern not in of_none)
        return [text for pattern, text in of_none.items() if pattern not in self._matched]


def checked(remat: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Return the user's `remat`, checked: None, `"block"`, or patterns.

    Raises:
        FlowError: it is another text than `"block"`, or has a pattern that is no regular expression.
    """
    if remat is None:
        return None
    if isinstance(remat, str):
        if remat != BLOCKS:
            raise FlowError(
                f'remat is None, "block" (the repeated blocks of a model) or a list of regular expressions of layer '
                f"paths, got {remat!r}; for example remat=['decoder_.*/mlp$']"
            )
        return remat
    found = tuple(remat)
    for pattern in found:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise FlowError(f"remat: {pattern!r} is not a regular expression: {error}") from error
    if not found:
        raise FlowError('remat=[] names no layer: leave it out, or give patterns of layer paths, or "block"')
    return found


def layers_of(model: keras.Model, remat: str | Sequence[str]) -> tuple[list[Any], dict[str, str]]:
    """The layers of a built model that are computed again, and of each pattern that matches none what to say."""
    inner = [layer for layer in model._flatten_layers(include_self=False) if layer is not models.graph_of(model)]
    if remat == BLOCKS:
        kinds = Counter(map(_kind, inner))
        found = [layer for layer in inner if kinds[_kind(layer)] > 1 and _kind(layer)]
        if not found:
            return [], {
                BLOCKS: 'remat="block": the model has no two layers of one class and shape that have layers '
                f"themselves: name layers by patterns of their paths, for example remat=[{_example(inner)!r}]"
            }
        return _outermost(found), {}
    paths = {id(layer): layer.path or layer.name for layer in inner}
    found = [layer for layer in inner if any(re.search(pattern, paths[id(layer)]) for pattern in remat)]
    unmatched = {
        pattern: f"remat: {pattern!r} matched no layer; {near_names.or_examples(pattern, list(paths.values()))}"
        for pattern in remat
        if not any(re.search(pattern, path) for path in paths.values())
    }
    return _outermost(found), unmatched


def _kind(layer: Any) -> tuple[object, ...]:
    """Return a key that repeated blocks share: class, shapes and dtypes. It is empty for a layer without layers."""
    if not layer._layers or not layer.weights:
        return ()
    return type(layer), *((tuple(weight.shape), weight.dtype) for weight in layer.weights)


def _outermost(layers: list[Any]) -> list[Any]:
    within = {id(inner) for layer in layers for inner in layer._flatten_layers(include_self=False)}
    return [layer for layer in layers if id(layer) not in within]


def _example(layers: list[Any]) -> str:
    return next((layer.path or layer.name for layer in layers if layer.weights), "block")
