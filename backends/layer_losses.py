"""Mends how Keras tells the losses of one layer from those of another in a `StatelessScope`: by `id`.

The scope holds the losses that layers add. Each layer keeps the `id`s of its own losses, and when it is called again
Keras removes these from the scope. The `id`s outlive the losses, and Python uses memory again. So a layer may hold an
`id` that is now that of another layer's loss, which Keras then removes: a step of JAX is traced without one activity
regularizer. Its loss is wrong by some per cent, without a warning, about once in two hundred traces.

Example: in the first trace layer `a` adds a loss with the `id` 7. In the second trace layer `b` is called first, and
its loss happens to have the `id` 7. Then `a` is called, removes "its" loss 7, and the loss of `b` is lost.
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
