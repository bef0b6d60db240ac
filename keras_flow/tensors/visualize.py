"""`kf.visualize`: which rank holds which part of a tensor, as a picture."""

from __future__ import annotations

from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.pictures.drawing import Drawing
from keras_flow.tensors.from_engine import global_tensor
from keras_flow.tensors.global_tensor import GlobalTensor


def visualize(value: object) -> Drawing:
    """A picture of who holds what; nothing is communicated.

    Args:
        value: a layout, a global tensor, a Keras variable made under a scope, or a distributed tensor of an engine:
            `jax.Array`, torch's or TensorFlow's DTensor, TensorFlow's MirroredVariable.

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
    if isinstance(value, Layout):
        layout = value
    else:
        try:
            layout = (value if isinstance(value, GlobalTensor) else global_tensor(value)).layout
        except FlowError as error:
            text = str(error).replace("kf.global_tensor reads", "kf.visualize draws layouts, global tensors,")
            raise FlowError(text) from None
    lines = [repr(layout)]
    for rank in layout.placement.ranks:
        spans = ", ".join(f"{part.start}:{part.stop}" for part in layout.local_slices(rank))
        lines.append(f"  rank {rank}: [{spans}]" + (" (a summand)" if layout.has_partial else ""))
    return Drawing(layout.picture() or "", "\n".join(lines))
