"""Keras's masks of a model's outputs for the whole batch, before any layer computes.

The loss of a micro-batch is a share of the batch's, and the share depends on how many entries the mask leaves in all.
Layers make masks of the model's inputs (an Embedding of its ids, a Masking of its values) and hand them on, so they are
known without what the layers compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree

from keras_flow.errors import FlowError
from keras_flow.pipelines.graph import CallGraph, filled


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
    found: dict[int, Any] = {}
    for call in graph.calls:
        layer = call.operation
        if not isinstance(layer, keras.Layer) or not layer.supports_masking:
            continue
        first = call.args[0] if call.args else None
        refs = tree.flatten(first)
        previous = tree.map_structure(lambda ref: found.get(getattr(ref, "key", -1)), first)
        own = _known(graph, first, values)
        try:
            mask = layer.compute_mask(own, previous)
        except Exception as error:
            raise FlowError(
                f"layer {layer.path!r} makes a mask of what an earlier layer computes, so that how many entries it "
                "leaves is not known before the first backward pass of a pipeline. Make the mask of the model's inputs"
            ) from error
        if mask is None:
            continue
        for key, each in zip(call.outputs, tree.flatten(mask), strict=False):
            if each is not None and not isinstance(each, keras.KerasTensor):
                found[key] = keras.ops.convert_to_numpy(each)
            elif each is not None:
                raise FlowError(
                    f"layer {layer.path!r} makes a mask of what {len(refs)} earlier layers compute, so that how many "
                    "entries it leaves is not known before the first backward pass of a pipeline. Make the mask of "
                    "the model's inputs"
                )
    return filled(graph.outputs, {key: OutputMask(found.get(key)) for key in range(len(graph.tensors))})


def _known(graph: CallGraph, structure: Any, values: dict[int, Any]) -> Any:
    """The tensors of a call: those of the model's inputs, and for others what is known of their shapes."""
    everything = {key: values.get(key, tensor) for key, tensor in enumerate(graph.tensors)}
    return filled(structure, everything)
