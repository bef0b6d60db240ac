"""Keras's inference of shapes on PyTorch, which runs a layer's `call` on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends.hooking import hook
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.keras_places import get_stateless_scope


@hook(
    "keras:core",
    "compute_output_spec",
    'a `call` that the device "meta" cannot run is run on plain tensors, which DTensors do not mix with',
)
def infer(
    _: object, original: Callable[..., object], function: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Hook on `compute_output_spec`: with plain tensors, where `call` fails on the device "meta".

    The split variables of the layer whose `call` it is are plain there: one zero shown in the logical shape, that takes
    no memory and no collective. Only the shape and the dtype of the result are read.
    """
    owner = function if isinstance(function, keras.Layer) else getattr(function, "__self__", None)
    if not isinstance(owner, keras.Layer):
        return original(function, *args, **kwargs)

    def on_plain(*inputs: object, **named: object) -> object:
        # on "meta" Keras has no values at all, and DTensors do not get in the way
        if core.get_device() != "meta":
            scope: Any = get_stateless_scope()  # Keras infers shapes inside one
            for variable in owner.variables:
                if isinstance(variable._value, DTensor):
                    zero = torch.zeros((), dtype=core.to_torch_dtype(variable._dtype), device=core.get_device())
                    scope.add_update((variable, zero.expand(tuple(variable._shape))))
        return function(*inputs, **named)

    return original(on_plain, *args, **kwargs)
