"""Layers that are computed again in the backward pass, so that what they computed inside need not be held (`remat=`).

Which layers these are, a distribution says. Keras computes a layer again when a `keras.RematScope` was open as it was
made; the hook here makes such layers of others, for the time of a call. Each engine's `rematerialized.py` has the hook
on what Keras calls then: a layer's seeds, moving statistics and losses belong to the first run alone, and the second
one draws what the first one drew.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_flow.backends import leaves
from keras_flow.backends.hooking import hook
from keras_flow.current import models
from keras_flow.current.distribution import Distribution, applied
from keras_flow.current.keras_places import get_keras_mask, set_keras_mask


class _Mode(NamedTuple):
    """The remat scope that was open when a layer was made, as Keras asks for it."""

    mode: str = "full"
    output_size_threshold: int = 0
    layer_names: tuple[str, ...] = ()


_FULL = _Mode()


def chosen(layer: keras.Layer, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `Layer.__call__`: the distribution, where it computes this layer again."""
    distribution = applied()
    return distribution if distribution is not None and layer in distribution.rematerialized else None


@hook("keras.Layer", "__call__", "`remat=` names layers; keras.RematScope must be open when they are made", when=chosen)
def call(_: Distribution, original: Callable[..., object], layer: Any, *args: object, **kwargs: object) -> object:
    """Hook on `Layer.__call__`: as if a `keras.RematScope` had been open when the layer was made."""
    before = layer._remat_mode
    layer._remat_mode = _FULL
    try:
        return original(layer, *args, **kwargs)
    finally:
        layer._remat_mode = before


def layers_of(function: Callable[..., object]) -> list[Any]:
    """The layers that a function calls: the layer whose method it is, otherwise the one that is called, and its own."""
    layer: Any = getattr(function, "__self__", None)
    layer = layer if isinstance(layer, keras.Layer) else models.layer_in_call()
    return layer._flatten_layers() if isinstance(layer, keras.Layer) else []


def state_of(layers: list[Any]) -> list[keras.Variable]:
    """The variables that a call of layers may assign: seeds, statistics and whatever else is not trained."""
    found = {
        id(variable): variable
        for layer in layers
        for variable in (*models.own_variables(layer), *_seeds(layer))
        if not variable.trainable
    }
    return list(found.values())


def _seeds(layer: Any) -> list[keras.Variable]:
    return [generator.state for generator in layer._seed_generators]


def forgets(layer: Any, loss: object) -> bool:
    """Whether a loss of the inner run was a layer's, which no more is: its `id` may come to be another loss's."""
    is_own = id(loss) in layer._loss_ids
    layer._loss_ids.discard(id(loss))
    return is_own


def python_draws() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which Python's generator draws once more what it draws from here on, as `AugMix` does."""
    begun = random.getstate()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = random.getstate()
        random.setstate(begun)
        try:
            yield
        finally:
            random.setstate(now)

    return again


def masks_of(structure: Any) -> list[Any]:
    """The masks that the tensors of a structure carry, in order; None for those without."""
    return [None if leaf is None else get_keras_mask(leaf) for leaf in leaves.flat(structure)]


def put_masks(structure: Any, masks: list[Any]) -> None:
    """Let the tensors of a structure carry masks."""
    for leaf, mask in zip(leaves.flat(structure), masks, strict=True):
        if mask is not None:
            set_keras_mask(leaf, mask)
