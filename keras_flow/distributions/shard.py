"""`kf.shard`: layouts of one layer's variables, written on the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from keras_flow import sbp
from keras_flow.current.models import own_variables
from keras_flow.distributions import models
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

_specs: WeakKeyDictionary[keras.Layer, dict[str, sbp.SbpSpec]] = WeakKeyDictionary()


def shard(layer: keras.Layer, **specs: sbp.SbpSpec) -> keras.Layer:
    """Give variables of a layer a layout, which wins over rules. A built layer's variables are moved into it.

    Args:
        layer: the layer.
        specs: variable name (`kernel`, `bias`, `embeddings` ...) -> nd_sbp.

    Returns:
        The layer, so that it can be used in place.

    Raises:
        FlowError: a built layer has no variable of that name.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.ModelParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))).scope():
        ...     layer = kf.shard(keras.layers.Dense(64), kernel={"model": kf.sbp.split(1)})
        ...     layer.build((None, 32))
        >>> kf.layout_of(layer.kernel).layout.local_shape(0)
        (32, 32)
    """
    if problems := _unknown(layer, specs):
        raise FlowError(problems[0])
    _specs[layer] = {**_specs.get(layer, {}), **specs}
    if layer.built:
        models.relay_layer(layer)
    return layer


def unknown_names(layer: keras.Layer) -> list[str]:
    """A sentence on variable names that `kf.shard` was given before the layer was built and that it does not have."""
    return _unknown(layer, _specs.get(layer, {}))


def _unknown(layer: keras.Layer, specs: Mapping[str, sbp.SbpSpec]) -> list[str]:
    if not layer.built or not specs:
        return []
    names = {variable.path.rpartition("/")[2] for variable in own_variables(layer)}
    missing = [name for name in specs if name not in names]
    text = f"kf.shard: layer {layer.name!r} has no variable {', '.join(map(repr, missing))}; it has {sorted(names)}"
    return [text] if missing else []


def shard_of(layer: keras.Layer | None, path: str) -> sbp.SbpSpec | None:
    """The nd_sbp that `kf.shard` gave to the variable with this path, or None."""
    if layer is None:
        return None
    return _specs.get(layer, {}).get(path.rpartition("/")[2])
