"""Modules of torch in a Keras model: their parameters are the model's variables, in whatever layout those have.

Keras's TorchModuleWrapper, which also takes each module that is assigned to an attribute of a layer, makes a variable
of every parameter, and the two share one tensor. Under a distribution a variable gets another tensor. Then the module
computed with the old one, which no optimizer updated. So the module is given the variables' tensors: in each call the
values of that call, and otherwise the parameters that are trained, which `state_dict` and optimizers of torch find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends.hooking import hook
from keras_flow.current.keras_places import engine_core as core

Wrapper = keras.layers.TorchModuleWrapper

#: wrapper -> its variables, each with the names of the parameter that it was made of: tied weights have several
_shared: WeakKeyDictionary[keras.Layer, list[tuple[keras.Variable, tuple[str, ...]]]] = WeakKeyDictionary()


def _shared_by(layer: keras.Layer) -> list[tuple[keras.Variable, tuple[str, ...]]]:
    if not isinstance(layer, Wrapper):
        return []
    if layer not in _shared:  # before a variable that got another tensor gave it to the module
        parameters = list(layer.module.named_parameters(remove_duplicate=False))
        _shared[layer] = [
            (variable, tuple(name for name, parameter in parameters if id(parameter) == _first(variable)))
            for variable in layer.variables
        ]
    return _shared[layer]


def _first(variable: keras.Variable) -> int:
    """The id of the parameter that a variable was made of, which its module holds."""
    return getattr(variable, "_keras_flow_first", id(variable._value))


def hand_over(layer: keras.Layer) -> None:
    """Make the tensors of a wrapper's variables the parameters of its module."""
    _set(layer, values_elsewhere(layer) or {})


def values_elsewhere(layer: keras.Layer, *args: object, **kwargs: object) -> dict[str, torch.Tensor] | None:
    """Condition of the hook on `TorchModuleWrapper.call`: the variables' tensors, where its module has others."""
    found = _values(layer)
    own = dict(layer.module.named_parameters(remove_duplicate=False)) if found else {}
    return found if any(own.get(name) is not value for name, value in found.items()) else None


@hook(
    "keras.layers.TorchModuleWrapper",
    "call",
    "a module computes with the model's variables; else with the tensors that they had before the scope",
    when=values_elsewhere,
)
def call(
    values: dict[str, torch.Tensor],
    original: Callable[..., object],
    layer: keras.layers.TorchModuleWrapper,
    *args: object,
    training: bool | None = None,
    **kwargs: object,
) -> object:
    """Hook on `TorchModuleWrapper.call`: the module is called with the variables' tensors."""
    layer.train(training is not False)  # as Keras does
    return torch.func.functional_call(layer.module, values, args, kwargs)


def distributed_values(layer: keras.Layer, *args: object, **kwargs: object) -> dict[str, torch.Tensor] | None:
    """Condition of the hooks on reading and writing a wrapper: the variables' tensors, where any is distributed."""
    found = _values(layer)
    return found if any(isinstance(value, DTensor) for value in found.values()) else None


@hook(
    "keras.layers.TorchModuleWrapper",
    "save_own_variables",
    "a file gets the model's variables; else what the module had before the scope",
    when=distributed_values,
)
def save(values: dict[str, torch.Tensor], original: Callable[..., None], layer: keras.Layer, store: dict) -> None:
    """Hook on `TorchModuleWrapper.save_own_variables`: `state_dict` has the variables' values."""
    with _holding(layer, values):
        original(layer, store)


@hook(
    "keras.layers.TorchModuleWrapper",
    "load_own_variables",
    "`load_state_dict` cannot copy a whole tensor into a DTensor",
    when=distributed_values,
)
def load(values: dict[str, torch.Tensor], original: Callable[..., None], layer: keras.Layer, store: dict) -> None:
    """Hook on `TorchModuleWrapper.load_own_variables`: whole tensors, of which variables take parts."""
    whole = {name: torch.empty(value.shape, dtype=value.dtype, device=value.device) for name, value in values.items()}
    with _holding(layer, whole):
        original(layer, store)
    for variable, names in _shared_by(layer):
        if names:
            variable.assign(whole[names[0]])


def _values(layer: keras.Layer) -> dict[str, torch.Tensor]:
    """The tensor of a wrapper's variables, by the names of the parameters that they were made of."""
    return {name: variable._value for variable, names in _shared_by(layer) for name in names}


@hook(
    "keras.layers.TorchModuleWrapper",
    "get_config",
    "the module is written by torch.save, which would write DTensors of this job",
    when=distributed_values,
)
def config(values: dict[str, torch.Tensor], original: Callable[..., dict], layer: keras.Layer) -> dict:
    """Hook on `TorchModuleWrapper.get_config`: the module is written with whole tensors."""
    # as any reading of weights: rank 0, which may write alone, asks the others
    whole = {name: core.convert_to_tensor(core.convert_to_numpy(value)).cpu() for name, value in values.items()}
    with _holding(layer, whole):
        return original(layer)


@contextlib.contextmanager
def kept_state(layer: keras.Layer) -> Iterator[None]:
    """Buffers of wrapped modules, as moving statistics, are afterwards what they were: shapes are inferred inside."""
    wrappers = [part for part in layer._flatten_layers() if isinstance(part, Wrapper)]
    before = [(buffer, buffer.clone()) for part in wrappers for buffer in part.module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextlib.contextmanager
def _holding(layer: keras.Layer, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    own = dict(layer.module.named_parameters(remove_duplicate=False))
    before = {name: own[name] for name in values}
    _set(layer, values)
    try:
        yield
    finally:
        _set(layer, before)


def _set(layer: keras.Layer, values: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters of a wrapper's module by name; aliases of one tensor stay one."""
    made: dict[int, torch.nn.Parameter] = {}
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        holder = layer.module.get_submodule(owner)
        parameter = value if isinstance(value, torch.nn.Parameter) else made.get(id(value))
        if parameter is None:
            is_trained = getattr(holder, last).requires_grad
            parameter = made[id(value)] = torch.nn.Parameter(value, requires_grad=is_trained)
        setattr(holder, last, parameter)
