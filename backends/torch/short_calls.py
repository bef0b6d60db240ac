"""Calls of layers that go straight to `layer.call`, where Keras's own way there was seen to change nothing.

`Layer.__call__` of Keras 3.15 takes some 100 microseconds: it binds arguments, converts them, looks for masks, compares
shapes, and wraps `call` to explain errors. What it finds depends on the layer, on the shapes and dtypes of its inputs
and on whether they have masks. So a first call with these goes the whole way; a later one makes what is left of it: the
name scope, `training` as the layers around have it, masks that a layer makes, and a layout of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import keras
import torch
from packaging.version import Version
from torch.distributed.tensor import DTensor

from keras_flow.current.keras_places import (
    current_distribution,
    current_path,
    explained,
    get_autocast_scope,
    get_global_attribute,
    get_keras_mask,
    is_default,
    is_float_dtype,
    lay_outputs,
)

_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
_MANY = (list, tuple)
#: methods that someone may have replaced on a layer
_REPLACED = ("call", "forward", "compute_mask")
#: inputs of a layer that are remembered
_MOST = 256
#: a layer's own default of `training` holds for the layers inside it too, until Keras 3.16
_KEEPS_DEFAULTS = Version(keras.__version__) < Version("3.16.dev0")
_global_hooks = torch.nn.modules.module._has_any_global_hook  # private: who listens to all modules


@dataclass
class _Way:
    """How a layer's calls go.

    Attributes:
        is_there: a short way can be.
        policy: its policy of dtypes as this was found.
        autocast: whether it casts its inputs, likewise.
        input_spec: what it says of its inputs, likewise.
        dtype: what it computes in, where variables have the same; None where it casts none of them.
        is_mixed: its variables have another dtype.
        has_training: `call` takes `training`.
        training: its default.
        makes_masks: it has a `compute_mask` of its own.
        seen: the inputs with which it was called the whole way.
    """

    is_there: bool
    policy: object
    autocast: bool
    input_spec: object
    dtype: str | None
    is_mixed: bool
    has_training: bool
    training: object
    makes_masks: bool
    seen: set[object] = field(default_factory=set)


_ways: WeakKeyDictionary[keras.Layer, _Way] = WeakKeyDictionary()


def call(original: Callable[..., object], layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call a layer within another layer's call, the short way where it was called alike before.

    Args:
        original: `Layer.__call__`.
        layer: the layer.
        args: its inputs: tensors and DTensors, or lists of them, go the short way.
        kwargs: likewise; tensors, truth values and None.
    """
    inputs = _described(args, kwargs)
    if inputs is None:
        return original(layer, *args, **kwargs)
    way = _ways.get(layer)
    if way is not None and not way.is_there:
        return original(layer, *args, **kwargs)
    context = get_global_attribute("current_call_ctx")
    if (
        way is not None
        and inputs in way.seen
        and context is not None
        and context.entry_layer is not layer
        and _changes_nothing(layer, way)
    ):
        return _call(layer, way, context, args, kwargs)
    outputs = original(layer, *args, **kwargs)
    if way is None or not _is_as_found(layer, way):
        way = _ways[layer] = _way_of(layer)
    if way.is_there and _binds_alike(layer, args, kwargs):
        if len(way.seen) >= _MOST:  # sequences of any length, say: the last ones may come again
            way.seen.clear()
        way.seen.add(inputs)
    return outputs


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object | None:
    """Shapes and dtypes of all inputs; None where one is not a tensor without a mask, or none is by position."""
    if not args:
        return None
    found: list[object] = []
    for value in args:
        if type(value) in _MANY:
            found.append(len(value))
        for part in _parts(value):
            if type(part) not in _TENSORS or get_keras_mask(part) is not None:
                return None
            found += (part.shape, part.dtype)
    for name, value in kwargs.items():
        if name == "mask" and value is not None:  # it becomes that of the outputs
            return None
        if value is None or value is True or value is False:
            found += (name, value)
        elif type(value) in _TENSORS and get_keras_mask(value) is None:
            found += (name, value.shape, value.dtype)
        else:
            return None
    return tuple(found)


def _parts(value: Any) -> Sequence[Any]:
    return value if type(value) in _MANY else (value,)


def _changes_nothing(layer: keras.Layer, way: _Way) -> bool:
    """Whether nothing was asked of the layer that only the whole way does."""
    if (
        not _is_as_found(layer, way)
        or not layer.built
        or not layer.__dict__.keys().isdisjoint(_REPLACED)
        or layer.activity_regularizer is not None
        or layer._remat_mode is not None
        or layer._compiled_call_impl is not None
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or _global_hooks()
    ):
        return False
    scope = get_autocast_scope()
    return not way.is_mixed if scope is None else way.dtype is not None and scope.dtype == way.dtype


def _is_as_found(layer: keras.Layer, way: _Way) -> bool:
    return layer._dtype_policy is way.policy and layer.autocast is way.autocast and layer._input_spec is way.input_spec


def _call(layer: keras.Layer, way: _Way, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    # as `Layer._resolve_and_populate_arg`: given, else of the layers around, else the default
    if "training" in kwargs:
        training = kwargs["training"]
        if not way.has_training:
            kwargs = {name: value for name, value in kwargs.items() if name != "training"}
    else:
        training = context.get_value("training")
        if training is None and _KEEPS_DEFAULTS:
            training = way.training
    context.set_value("training", training)
    if way.has_training and training is not None:
        kwargs = {**kwargs, "training": training}
    with keras.name_scope(layer.name, caller=layer):
        try:
            outputs = layer.call(*args, **kwargs)
        except Exception as error:
            if not keras.config.is_traceback_filtering_enabled():
                raise
            raise explained(error, layer.call, args, kwargs, f"{type(layer).__name__}.call()") from None
        distribution = current_distribution()
        layout = distribution.get_tensor_layout(current_path() + "/output") if distribution is not None else None
        if layout:
            outputs = lay_outputs(outputs, layout)
    if way.makes_masks:
        first = args[0]
        layer._set_mask_metadata(first, outputs, [None] * len(first) if type(first) in _MANY else None)
    return outputs


def _way_of(layer: keras.Layer) -> _Way:
    dtype = layer.compute_dtype
    training = layer._call_signature.parameters.get("training")
    parameters = layer._call_signature.parameters.values()
    is_there = (
        type(layer).__call__ is keras.Layer.__call__
        and type(layer).forward is keras.Layer.forward
        and not isinstance(layer._dtype_policy, keras.dtype_policies.DTypePolicyMap)  # changed in place
        and layer._call_context_args == {"training"}
        and not any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
    )
    return _Way(
        is_there,
        layer._dtype_policy,
        layer.autocast,
        layer._input_spec,
        dtype if layer.autocast and is_float_dtype(dtype) else None,
        dtype != layer.variable_dtype,
        training is not None,
        training.default if training is not None else None,
        layer.supports_masking and not is_default(layer.compute_mask),
    )


def _binds_alike(layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `call` gets these arguments as they are, with no mask beside them that is not its default."""
    parameters = layer._call_signature.parameters
    if not layer.built or layer.quantization_mode is not None:
        return False
    kwargs = {name: value for name, value in kwargs.items() if name != "training" or name in parameters}
    bound = layer._call_signature.bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in bound.items() if type(value) in (*_TENSORS, *_MANY)}
    masks = [parameters[name] for name in ("mask", *(f"{each}_mask" for each in tensors)) if name in parameters]
    # masks of a list are a list, though it be one of None
    has_list = any(type(value) in _MANY for value in tensors.values())
    if any(each.default is not None for each in masks) or (masks and has_list):
        return False
    leaves = [leaf for value in tensors.values() for leaf in _parts(value)]
    return not layer._convert_input_args or all(
        not leaf.is_floating_point() or keras.backend.standardize_dtype(leaf.dtype) == layer.input_dtype
        for leaf in leaves
    )
