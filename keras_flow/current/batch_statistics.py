"""BatchNormalization with the statistics of each replica's rows, on request (`batch_statistics="replica"`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import keras
from keras import ops

from keras_flow.errors import FlowError
from keras_flow.layout import balanced


def refuse_renorm(layer: keras.layers.BatchNormalization) -> None:
    """Refuse batch renormalization by groups: what it corrects by, the call of one group changes for the next.

    Raises:
        FlowError: the layer has `renorm=True`.
    """
    if layer.renorm:
        raise FlowError(f'layer {layer.name!r}: renorm=True needs batch_statistics="global"')


def by_groups(
    call: Callable[..., object],
    layer: keras.layers.BatchNormalization,
    inputs: keras.KerasTensor,
    groups: int,
    training: bool | None,
    mask: keras.KerasTensor | None = None,
) -> object:
    """Apply a BatchNormalization to groups of rows, each with its own statistics.

    The groups are the balanced split of the logical rows. The layer's own call runs once for each group, each time from
    the same moving statistics. Afterwards these are set to the mean of the groups' results; as their update is linear,
    that is the update with the mean of the groups' statistics.

    Args:
        call: the layer's original `call`.
        layer: the layer.
        inputs: tensor of shape [rows, ...].
        groups: number of replicas; groups without rows are left out.
        training: as in Keras.
        mask: tensor of shape [rows, ...] with one dimension less than `inputs`, or None.

    Returns:
        Tensor of the shape of `inputs`.
    """
    rows = int(cast(tuple[int, ...], ops.shape(inputs))[0])
    blocks = [block for block in (balanced(rows, groups, index) for index in range(groups)) if block[1] > block[0]]
    moving = cast(tuple[keras.Variable, ...], (layer.moving_mean, layer.moving_variance))
    before = [ops.copy(variable.value) for variable in moving]
    outputs, after = [], []
    for start, stop in blocks:
        for variable, value in zip(moving, before, strict=True):
            variable.assign(value)
        part = None if mask is None else mask[start:stop]
        outputs.append(call(layer, inputs[start:stop], training=training, mask=part))
        after.append([ops.copy(variable.value) for variable in moving])
    for index, variable in enumerate(moving):
        variable.assign(ops.mean(ops.stack([values[index] for values in after]), axis=0))
    return ops.concatenate(outputs, axis=0)
