"""Keras's masks of a model's outputs for the whole batch, before any layer computes.

The loss of a micro-batch is a share of the batch's, and the share depends on how many entries the mask leaves in all.
Layers make masks of the model's inputs (an Embedding of its ids, a Masking of its values) and hand them on, so they are
known without what the layers compute.
"""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree

from keras_flow.errors import FlowError
from keras_flow.pipelines.graph import CallGraph, Ref, filled


@dataclass(frozen=True)
class OutputMask:
    """What is known of one of the model's outputs before it is computed.

    Attributes:
        mask: an array of the whole batch, or None.
    """

    mask: Any


def of_outputs(graph: CallGraph, inputs: Sequence[Any]) -> Any:
    """Return the structure of the model's outputs, with an `OutputMask` in the place of each tensor.

    Args:
        graph: the model's calls.
        inputs: the model's inputs, flat, host arrays.

    Raises:
        FlowError: a mask is made of what a layer computes.
    """
    values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    everything = ChainMap(values, dict(enumerate(graph.tensors)))  # of others than inputs what is known of their shapes
    found: dict[int, Any] = {}
    for call in graph.calls:
        layer = call.operation
        if not isinstance(layer, keras.Layer) or not layer.supports_masking:
            continue
        # as Keras does: the first argument of `call` hands its mask on, unless the call is given one by its name
        first = call.args[0] if call.args else call.kwargs.get(next(iter(inspect.signature(layer.call).parameters)))
        asked = call.kwargs.get("mask")
        own = filled(first, everything)
        try:
            if asked is None:
                previous = tree.map_structure(lambda ref: found.get(getattr(ref, "key", -1)), first)
            else:
                previous = tree.map_structure(lambda leaf: _computed(graph, leaf, values), asked)
            mask = layer.compute_mask(own, previous)
        except Exception as error:
            raise _unknown(layer) from error
        if mask is None:
            continue
        for key, each in zip(call.outputs, tree.flatten(mask), strict=False):
            if isinstance(each, keras.KerasTensor):
                raise _unknown(layer)
            if each is not None:
                found[key] = keras.ops.convert_to_numpy(each)
    return filled(graph.outputs, {key: OutputMask(found.get(key)) for key in graph.output_keys})


def _unknown(layer: keras.Layer) -> FlowError:
    return FlowError(
        f"layer {layer.path!r} makes a mask of what an earlier layer computes, so that how many entries it leaves is "
        "not known before the first backward pass of a pipeline. Make the mask of the model's inputs"
    )


def _computed(graph: CallGraph, leaf: Any, values: dict[int, Any]) -> Any:
    """A mask that a call is given, computed by the operations that make it of the model's inputs."""
    if not isinstance(leaf, Ref):
        return leaf
    if leaf.key not in values:
        call = next(each for each in graph.calls if leaf.key in each.outputs)
        if isinstance(call.operation, keras.Layer):
            raise TypeError(f"{call.path} is a layer")
        for key in call.inputs:
            _computed(graph, Ref(key), values)
        values.update(zip(call.outputs, call.run(values, None), strict=True))
    return values[leaf.key]
