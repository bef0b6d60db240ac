"""Rules to begin with, from a model's layers: attention by heads, pairs of layers by columns and then by rows.

The scheme is that of Megatron-LM (Shoeybi et al., 2019, section 3; docs/howto/rules.md). Two layers are a pair if the
second follows the first in the same layer or model, takes as many features as that makes, and no layer with weights
stands between them. Layers of one shape beside the first go with it: the gate of a SwiGLU block, whose outputs are
multiplied. What has no partner stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

_PRODUCTS = (keras.layers.Dense, keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
#: weight of attention -> its dim of heads: kernels [inputs, heads, size], biases [heads, size], the output's kernel
#: [heads, size, outputs], which adds up over them
_HEADS = {
    **{f"{name}/kernel": 1 for name in ("query", "key", "value")},
    **{f"{name}/bias": 0 for name in ("query", "key", "value")},
    "attention_output/kernel": 0,
}


def first_rules(model: keras.Model) -> dict[str, dict[str, int]]:
    """Variable path -> the axis `"model"` -> the dim to split; for a built model."""
    rules: dict[str, int] = {}
    for siblings in _levels(model):
        before: list[Any] = []  # the last layer with weights, and those of its shape beside it
        for layer in siblings:
            if isinstance(layer, _ATTENTION):
                rules |= _of_attention(layer)
            if not (_is_product(layer) and layer.built):
                before = [] if layer.weights else before
            elif before and _is_pair(before[-1], layer):
                for first in before:
                    rules |= _of_columns(first)
                rules[layer.kernel.path] = len(layer.kernel.shape) - 2
                before = []
            else:
                before = [*(each for each in before if _are_alike(each, layer)), layer]
    return {path: {"model": dim} for path, dim in rules.items()}


def _levels(layer: Any) -> Iterator[list[Any]]:
    """The layers in a layer, then those in each of them, in their order. Attention is one."""
    inner = layer.layers if isinstance(layer, keras.Model) else layer._layers
    yield inner
    for each in inner:
        if not isinstance(each, _ATTENTION):
            yield from _levels(each)


def _is_product(layer: Any) -> bool:
    return isinstance(layer, _PRODUCTS)


def _is_pair(first: Any, second: Any) -> bool:
    """Whether the second takes what the first makes, in parts that two ranks can share."""
    if type(first) is not type(second):
        return False
    made, taken = first.kernel.shape[-1], second.kernel.shape[-2]
    return made == taken and made % 2 == 0


def _are_alike(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one.kernel.shape == other.kernel.shape


def _of_columns(layer: Any) -> dict[str, int]:
    found = {layer.kernel.path: len(layer.kernel.shape) - 1}
    return found if layer.bias is None else {**found, layer.bias.path: 0}


def _of_attention(layer: Any) -> dict[str, int]:
    """Attention by heads; nothing where two ranks cannot share them."""
    named = [(variable, "/".join(variable.path.split("/")[-2:])) for variable in layer.weights]
    split = [(variable, _HEADS[name]) for variable, name in named if name in _HEADS]
    if any(variable.shape[dim] % 2 for variable, dim in split):
        return {}
    return {variable.path: dim for variable, dim in split}
