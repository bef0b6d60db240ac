"""Variables that belong to a weight of their layer, and take the layout that goes with the weight's.

Quantization gives a layer scales, zero points and histories beside its kernel; LoRA gives it two thin kernels. Nobody
writes rules for them, and a rule for `h/kernel` finds `h/kernel_scale` too. So each follows its weight: a scale for
each output is split as the outputs are, `lora_kernel_a` as the inputs, `lora_kernel_b` as the outputs.

Example: a kernel [6, 8] with S(1) over 4 ranks, quantized in groups of 3 rows. Its scale [2, 8] has S(1), [2, 2] on
each rank. Where the kernel has S(0) over 2 ranks the scale has S(0), one group each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import keras

from keras_flow.current.models import own_variables
from keras_flow.layout import Layout
from keras_flow.sbp import Sbp, Split, broadcast

#: last name of a variable that belongs to a weight, and that weight's name
_OF_A_WEIGHT = re.compile(r"(?:lora_)?(kernel|embeddings|reverse_embeddings)_(a|b|scale|zero|zero_point|amax_history)")
#: what EinsumDense names otherwise
_ALIASES = {"zero_point": "kernel_zero"}
#: those that belong to the weight and have none of its dims: state of inputs and gradients, indices of groups
_OF_THE_LAYER = re.compile(r"(?:inputs|outputs_grad)_(?:scale|amax_history)|g_idx|awq_scales")


def weight_of(path: str, layer: keras.Layer | None) -> keras.Variable | None:
    """The weight that a variable belongs to, where its layer has that weight; None for all other variables."""
    folder, _, name = path.rpartition("/")
    name = _ALIASES.get(name, name)
    found = _OF_A_WEIGHT.fullmatch(name)
    if layer is None or (found is None and _OF_THE_LAYER.fullmatch(name) is None):
        return None
    names = (found.group(1),) if found else ("kernel", "embeddings")
    weights = {f"{folder}/{each}".removeprefix("/") for each in names}
    # a layer in calibration has its first kernel and the packed one: the last is the one that the others go with
    return next((each for each in reversed(own_variables(layer)) if each.path in weights), None)


def layout_with(weight: Layout, path: str, shape: tuple[int, ...]) -> Layout:
    """The layout of a variable that belongs to a weight; broadcast on axes whose split it cannot follow.

    Args:
        weight: the layout of the weight.
        path: path of the variable.
        shape: its logical shape.

    Example:
        >>> from keras_flow import Placement
        >>> from keras_flow.sbp import parse
        >>> kernel = Layout(Placement(range(4)), parse("S(1)"), (6, 8))
        >>> layout_with(kernel, "h/kernel_scale", (8,)).nd_sbp
        (S(0),)
        >>> layout_with(kernel, "h/lora_kernel_a", (6, 2)).nd_sbp
        (B,)
    """
    return _carried(weight, _dims(path.rpartition("/")[2], weight.shape, shape), shape)


def unpacked_shape(layer: keras.Layer | None, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a layer's kernel has before it is packed: rules are written for that; `shape` where it is not."""
    # the layers that Keras packs: a layer of one's own may have attributes of these names
    if path.rpartition("/")[2] != "kernel" or not isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
        return shape
    known = getattr(layer, "original_kernel_shape", None) or getattr(layer, "kernel_shape", None)
    return tuple(known) if isinstance(known, tuple | list) else shape


def packed(weight: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of a packed kernel, [rows, columns] or [columns, rows], from that of the kernel.

    Example:
        >>> from keras_flow import Placement
        >>> from keras_flow.sbp import parse
        >>> heads = Layout(Placement(range(2)), parse("S(1)"), (6, 4, 8))  # to 4 heads of 8
        >>> packed(heads, (6, 16)).nd_sbp, packed(heads, (16, 6)).nd_sbp
        ((S(1),), (S(0),))
    """
    if len(shape) != 2:
        return weight if weight.shape == shape else Layout(weight.placement, {}, shape)
    for first in range(1, len(weight.shape)):
        rows, columns = math.prod(weight.shape[:first]), math.prod(weight.shape[first:])
        # of several dims in one the outermost is split into contiguous blocks
        if shape[0] == rows and _go_together(shape[1], columns):
            return _carried(weight, {0: 0, first: 1}, shape)
        if shape[1] == rows and _go_together(shape[0], columns):
            return _carried(weight, {0: 1, first: 0}, shape)
    return Layout(weight.placement, {}, shape)


def _carried(weight: Layout, dims: Mapping[int, int], shape: tuple[int, ...]) -> Layout:
    """A layout for `shape` that splits the dims which go with those that the weight's splits, where they divide."""
    parts: list[Sbp] = []
    kept = [1] * len(shape)
    for axis, part in zip(weight.placement.axis_names, weight.nd_sbp, strict=True):
        dim = dims.get(part.dim) if isinstance(part, Split) else None
        size = weight.placement.axis_size(axis)
        if dim is None or shape[dim] % (kept[dim] * size):
            parts.append(broadcast)
        else:
            kept[dim] *= size
            parts.append(Split(dim))
    return Layout(weight.placement, parts, shape)


def _dims(name: str, weight: tuple[int, ...], shape: tuple[int, ...]) -> Mapping[int, int]:
    """Dim of the weight -> the dim of the variable that goes with it."""
    found = _OF_A_WEIGHT.fullmatch(_ALIASES.get(name, name))
    if found is None or not shape or not weight:
        return {}
    last = len(weight) - 1
    kind = found.group(2)
    if kind == "a":  # [*inputs, rank]
        return {dim: dim for dim in range(min(last, len(shape) - 1))}
    if kind == "b":  # [rank, outputs]
        return {last: len(shape) - 1}
    if kind == "amax_history":
        return {}
    by_rows = found.group(1) == "embeddings" or not _go_together(weight[-1], shape[-1])
    if by_rows:  # a scale for each row of a table or of a kernel that is kept transposed, and for groups of its columns
        pairs = [(dim, dim) for dim in range(min(len(weight), len(shape)))]
    else:  # a scale for each output, and for groups of inputs
        pairs = [(last - back, len(shape) - 1 - back) for back in range(min(len(weight), len(shape)))]
    first = pairs[0]
    if not _go_together(weight[first[0]], shape[first[1]]):
        return {}
    return dict(pairs)


def _go_together(weight: int, length: int) -> bool:
    """Whether two dims have one length; 4-bit weights are packed two by two."""
    return length == weight or (length + 1) // 2 == weight
