"""`kf.global_tensor`: what Keras or an engine holds, as a global tensor."""

from __future__ import annotations

from typing import Any

import keras

from keras_flow.backends.active import tensor_engine
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.tensors.global_tensor import GlobalTensor
from keras_flow.tensors.ranks import local_ranks


def global_tensor(value: object) -> GlobalTensor:
    """A Keras variable created under a scope, or the engine's distributed array, as a global tensor; nothing is copied.

    Args:
        value: a `keras.Variable`, `jax.Array`, torch `DTensor` or TensorFlow DTensor.

    Raises:
        FlowError: it is none of these, or its shards are not those of a layout.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> placement = kf.Placement([0, 1, 2, 3], axis_names=("model",))
        >>> with kf.ModelParallel(placement, rules={"table": "S(0)"}).scope():
        ...     variable = keras.Variable(keras.ops.ones((8, 2)), name="table")
        >>> table = kf.global_tensor(variable)
        >>> table.shape, table.to_local(0).shape
        ((8, 2), (2, 2))
    """
    array: Any = value.value if isinstance(value, keras.Variable) else value
    engine = tensor_engine()
    layout_and_shards = engine.from_engine(array)
    variable = keras_layout(value) if isinstance(value, keras.Variable) else None
    if layout_and_shards is None and variable is not None:
        # a plain tensor of Keras, which no engine calls distributed: on each rank the whole value
        placement = variable.distribution.placement
        # a constant, as other shards are: what is computed of it is on no tape
        whole = engine.without_gradient(keras.ops.convert_to_tensor(value))
        shards = {rank: whole for rank in local_ranks() if placement.contains(rank)}
        layout_and_shards = Layout(placement, ["B"] * placement.ndim, array.shape), shards
    if layout_and_shards is None:
        raise FlowError(
            f"kf.global_tensor reads variables made under a keras_flow scope and the engine's distributed arrays; got "
            f"{type(array).__name__}. kf.to_global(local, placement, sbp) makes one of shards"
        )
    layout, shards = layout_and_shards
    return GlobalTensor(layout, keras.backend.standardize_dtype(array.dtype), shards)
