"""`kf.shard`: layouts of one layer's variables, written on the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from keras_flow import sbp
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

_specs: WeakKeyDictionary[keras.Layer, dict[str, sbp.SbpSpec]] = WeakKeyDictionary()


def shard(layer: keras.Layer, **specs: sbp.SbpSpec) -> keras.Layer:
    """Give variables of a layer a layout; wins over rules. On a built layer it re-lays them.

    Args:
        layer: the layer.
        specs: variable name (`kernel`, `bias`, `embeddings` ...) -> nd_sbp.

    Returns:
        The layer, so that it can be used in place.

    Raises:
        FlowError: a built layer has no variable of that name.

    Example:
        `kf.shard(keras.layers.Dense(64), kernel={"model": kf.sbp.split(1)})`
    """
    if layer.built:
        from keras_flow.distributions import models

        names = {variable.path.rpartition("/")[2]: variable for variable in models.own_variables(layer)}
        missing = [name for name in specs if name not in names]
        if missing:
            raise FlowError(f"layer {layer.name!r} has no variable {missing}; it has {sorted(names)}")
    _specs[layer] = {**_specs.get(layer, {}), **specs}
    if layer.built:
        from keras_flow.distributions import models

        models.relay_layer(layer)
    return layer


def shard_of(layer: keras.Layer | None, path: str) -> sbp.SbpSpec | None:
    """What `kf.shard` asked for the variable with this path, or None."""
    if layer is None:
        return None
    return _specs.get(layer, {}).get(path.rpartition("/")[2])
