"""`kf.visualize`: which rank holds which part of a tensor, as a picture."""

from __future__ import annotations

import re

import keras

from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.pictures.drawing import Drawing
from keras_flow.placements import Placement
from keras_flow.tensors.from_engine import global_tensor
from keras_flow.tensors.global_tensor import GlobalTensor


def visualize(value: object) -> Drawing:
    """A picture of who holds what; nothing is communicated.

    Args:
        value: a layout, a global tensor, a Keras variable, or any tensor of an engine: `jax.Array`, torch's or
            TensorFlow's DTensor, TensorFlow's MirroredVariable. A plain tensor is drawn on the rank of its device.

    Returns:
        The picture, which a notebook shows; `save(path)` writes it.

    Raises:
        FlowError: the value is none of these.

    Example:
        >>> import keras_flow as kf
        >>> kf.visualize(kf.Layout(kf.Placement(range(4)), "S(0)", (10, 2)))
        Layout(S(0) of [10, 2] on Placement([0, 1, 2, 3], axis_names=('axis0',)))
          rank 0: [0:3, 0:2]
          rank 1: [3:6, 0:2]
          rank 2: [6:8, 0:2]
          rank 3: [8:10, 0:2]
    """
    layout = value if isinstance(value, Layout) else _layout_of(value)
    lines = [repr(layout)]
    for rank in layout.placement.ranks:
        spans = ", ".join(f"{part.start}:{part.stop}" for part in layout.local_slices(rank))
        lines.append(f"  rank {rank}: [{spans}]" + (" (a summand)" if layout.has_partial else ""))
    return Drawing(layout.picture() or "", "\n".join(lines))


def _layout_of(value: object) -> Layout:
    try:
        return (value if isinstance(value, GlobalTensor) else global_tensor(value)).layout
    except FlowError:
        held = value.value if isinstance(value, keras.Variable) else value
        if not keras.ops.is_tensor(held):
            raise FlowError(
                "kf.visualize draws layouts, global tensors, Keras variables and tensors of the engine; got "
                f"{type(value).__name__}"
            ) from None
    # not distributed. Where a process drives several ranks (TensorFlow) the device's name ends with its number
    rank, *others = tensor_engine().world().local_ranks
    number = re.search(r":(\d+)$", str(getattr(held, "device", ""))) if others else None
    rank = [rank, *others][int(number[1])] if number else rank
    return Layout(Placement([rank]), "B", tuple(held.shape))  # type: ignore[attr-defined]
