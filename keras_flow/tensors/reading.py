"""Reading what an engine, or Keras, holds as a global tensor."""

from __future__ import annotations

from typing import Any

from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError
from keras_flow.tensors import engine
from keras_flow.tensors.global_tensor import GlobalTensor


def global_tensor(value: Any) -> GlobalTensor:
    """A Keras variable made under a scope, or the engine's distributed array, as a global tensor; nothing is copied.

    Args:
        value: a `keras.Variable`, `jax.Array`, torch `DTensor` or TensorFlow DTensor.

    Raises:
        FlowError: it is none of these, or its shards are not those of a layout.
    """
    import keras

    held = value.value if isinstance(value, keras.Variable) else value
    found = engine.tensor_engine().from_engine(held)
    placed = keras_layout(value) if isinstance(value, keras.Variable) else None
    if found is None and placed is not None and placed.distribution.has_one_rank:  # a plain tensor
        layout, (rank,) = placed.layout, placed.distribution.placement.ranks
        found = layout, {rank: keras.ops.convert_to_tensor(value)} if rank in engine.local_ranks() else {}
    if found is None:
        raise FlowError(
            f"kf.global_tensor reads variables made under a keras_flow scope and the engine's distributed arrays; got "
            f"{type(held).__name__}. kf.to_global(local, placement, sbp) makes one of shards"
        )
    layout, shards = found
    return GlobalTensor(layout, keras.backend.standardize_dtype(held.dtype), shards)
