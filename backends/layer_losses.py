"""Losses that layers add while a model is computed as a function of values: a layer knows its own by their `id`.

Keras has such losses in the `StatelessScope`, and in each layer the `id`s of its own until the layer is called next.
Python gives memory out again, so an `id` that is left from a scope that is gone may be that of another layer's loss in
the next one. As the layer is then called, Keras takes that loss out of the scope: a step of JAX is traced with one
activity regularizer less, which is wrong by some per cent, without a word, about once in two hundred traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_flow.backends.hooking import applied_distribution, hook


@contextlib.contextmanager
def apart(layers: Iterable[Any]) -> Iterator[None]:
    """Let layers know no losses inside but those that they add there, and those of before again afterwards."""
    before = [(layer._loss_ids, set(layer._loss_ids)) for layer in layers]
    for known, _ in before:
        known.clear()
    try:
        yield
    finally:
        for known, ids in before:
            known.clear()
            known.update(ids)


@hook(
    "keras.Layer",
    "stateless_call",
    "a layer takes another's loss for one that it added in the step traced before: an activity regularizer is left out",
    when=applied_distribution,  # a step on one rank has losses as well
)
def stateless_call(_: object, original: Callable[..., object], layer: Any, *args: object, **kwargs: object) -> object:
    """Hook on `Layer.stateless_call`: its scope begins without the losses of others."""
    with apart(layer._flatten_layers()):
        return original(layer, *args, **kwargs)
