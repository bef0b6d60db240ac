"""Gradients between the outputs of one direct call, for example of a score by an inner feature map (Grad-CAM).

The program receives plain tensors. Autograd knows the gradient of the score by the feature map only if the score was
computed from the very tensor that the program received. There are two cases:

1. A functional model: the output of the inner layer becomes a plain tensor, is handed out, and is split again for the
   layers that follow.
2. Any other layer, whose graph cannot be read: where it has several outputs and gradients are recorded, each rank
   computes the whole call on plain tensors, from gathered weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakKeyDictionary

import keras
import torch
from keras import tree
from torch.distributed.tensor import DTensor

from keras_flow.backends import leaves
from keras_flow.backends.torch import variables, wrapped_modules
from keras_flow.current import models
from keras_flow.current.keras_places import (
    compute_output_spec,
    in_stateless_scope,
)
from keras_flow.scoped import setting

#: ids of layers whose outputs the program gets from the call that is running outside of a step
_handed_out: ContextVar[frozenset[int]] = ContextVar("keras_flow_handed_out", default=frozenset())
#: layer -> arguments of a call that are no tensors -> whether it has several outputs
_has_several: WeakKeyDictionary[keras.Layer, dict[str, bool]] = WeakKeyDictionary()
_MOST_KNOWN = 64


def inner_outputs(layer: keras.Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> frozenset[int] | None:
    """Return the ids of the layers whose outputs a direct call hands out, and later layers read.

    None: they cannot be told, so the call is to be computed on plain tensors.
    """
    if not torch.is_grad_enabled():
        return frozenset()
    graph = models.stock_graph(layer)
    if graph is not None:
        return _of_graph(graph)
    # the values that `stateless_call` gives variables would hide plain ones
    return None if not in_stateless_scope() and _several(layer, args, kwargs) else frozenset()


def handing_out(layers: frozenset[int]) -> AbstractContextManager[None]:
    """Outputs of these layers, by id, are handed out by the call inside."""
    return setting(_handed_out, layers)


def is_one(layer: keras.Layer) -> bool:
    """Whether the outputs of a layer are handed out."""
    return id(layer) in _handed_out.get()


def through_plain(value: object) -> object:
    """Return a DTensor made of the plain tensor that the program will get; anything else as it is."""
    if not isinstance(value, DTensor) or not value.requires_grad:
        return value
    plain = variables.to_logical(value)
    again = variables.from_logical(plain, value.device_mesh, value.placements)
    leaves.with_mask_of(value, again)
    again.keras_flow_plain = plain  # type: ignore[attr-defined]
    return again


def _of_graph(graph: Any) -> frozenset[int] | None:
    if len(graph.outputs) < 2:
        return frozenset()
    read = {id(x) for nodes in graph._nodes_by_depth.values() for node in nodes for x in node.input_tensors}
    operations = [x._keras_history.operation for x in graph.outputs if id(x) in read]
    # the output of an operation is seen by no hook
    is_told = all(isinstance(operation, keras.Layer) for operation in operations)
    return frozenset(map(id, operations)) if is_told else None


def _several(layer: keras.Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a call of a layer has several outputs, by Keras's inference of shapes."""
    settings = repr([leaf for leaf in leaves.flat((args, kwargs)) if not hasattr(leaf, "shape")])
    known = _has_several.setdefault(layer, {})
    if settings not in known:
        if len(known) == _MOST_KNOWN:  # a number among the arguments may be another in each call
            known.clear()
        positional, named = cast("tuple[tuple, dict]", tree.map_structure(_spec, (args, kwargs)))
        try:
            with wrapped_modules.kept_state(layer):
                known[settings] = len(tree.flatten(compute_output_spec(layer.call, *positional, **named))) > 1
        except Exception:  # Python that asks for values: then they are computed on plain tensors
            known[settings] = True
    return known[settings]


def _spec(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))
