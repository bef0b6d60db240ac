"""Layers that are computed again in the backward pass: `torch.utils.checkpoint`, with the state of the first run."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends import leaves, rematerialized
from keras_flow.backends.hooking import applied_distribution, hook
from keras_flow.backends.torch.step import computing, current_step
from keras_flow.current import microbatch
from keras_flow.current.distribution import Distribution, active, holding
from keras_flow.current.keras_places import get_stateless_scope, in_stateless_scope
from keras_flow.errors import FlowError


@hook(
    "keras:core",
    "remat",
    "the second run of a layer would compute other rows, draw other numbers, and update statistics again",
    when=applied_distribution,
)
def remat(
    _: object, original: Callable[..., Callable[..., object]], function: Callable[..., object]
) -> Callable[..., object]:
    """Hook on `remat`: the second run of a layer computes the same rows, draws the same numbers, changes nothing."""

    def call(*args: object, **kwargs: object) -> object:
        step = current_step()
        # as in the first run: on its rows, or on all
        again = contextlib.nullcontext if step is None else functools.partial(computing, step, step.inside)
        layers = rematerialized.layers_of(function)
        as_then = _in_scope(layers) if in_stateless_scope() else _in_place(layers)
        part, modes = microbatch.current(), [(layer, layer._remat_mode) for layer in layers]
        draws_again, inputs = rematerialized.python_draws(), _changes_of((args, kwargs))
        runs, thread, context, distribution = 0, threading.get_ident(), contextvars.copy_context(), active()

        def run(*inner_args: object, **inner_kwargs: object) -> object:
            nonlocal runs
            runs += 1
            if runs == 1:
                outputs = function(*inner_args, **inner_kwargs)
                if _changes_of((args, kwargs)) != inputs:
                    raise FlowError(_writes_into_inputs(function, layers))
                return outputs
            in_part, in_modes = microbatch.computing(part), _in_modes(modes)

            def run_again() -> object:
                with again(), in_part, as_then(), in_modes, _leaving_nothing(layers), draws_again():
                    return function(*inner_args, **inner_kwargs)

            if threading.get_ident() == thread:
                return run_again()
            # torch's thread of an accelerator, which knows neither the step nor the distribution
            return context.run(_under, distribution, run_again)

        return original(run)(*args, **kwargs)

    return call


def _under(distribution: Distribution | None, function: Callable[[], object]) -> object:
    with holding(distribution):
        return function()


def _changes_of(structure: Any) -> list[int]:
    """How often each tensor of a structure was written into."""
    tensors = [leaf for leaf in leaves.flat(structure) if isinstance(leaf, torch.Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _writes_into_inputs(function: Callable[..., object], layers: list[Any]) -> str:
    layer = f"layer {layers[0].path!r} ({type(layers[0]).__name__})" if layers else f"{function!r}"
    return (
        f"{layer} writes into its inputs, so it cannot be computed again from them in the backward pass: leave it out "
        "of remat= (or make it outside of keras.RematScope)"
    )


@contextlib.contextmanager
def _in_modes(modes: list[tuple[Any, Any]]) -> Iterator[None]:
    """Give layers the `_remat_mode` of the first run, by which split ones choose how they are computed."""
    now = [(layer, layer._remat_mode) for layer, _ in modes]
    try:
        for layer, mode in modes:
            layer._remat_mode = mode
        yield
    finally:
        for layer, mode in now:
            layer._remat_mode = mode


@contextlib.contextmanager
def _leaving_nothing(layers: list[Any]) -> Iterator[None]:
    """Give layers back the attributes that they had.

    torch breaks the second run off once it has what the backward pass needs. So the end of a layer's `call` may not be
    reached, where a recurrent one forgets its dropout mask: its next step would take this mask.
    """
    before = [(vars(layer), dict(vars(layer))) for layer in layers]
    try:
        yield
    finally:
        for held, attributes in before:
            held.update(attributes)
            for name in held.keys() - attributes.keys():
                del held[name]


def _in_scope(layers: list[Any]) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that opens a stateless scope, in which variables have the values that they have now.

    What a layer assigns in that scope is forgotten when it closes.
    """
    scope = get_stateless_scope()
    variables = {id(variable): variable for layer in layers for variable in layer.variables}
    values = [(variable, scope.get_current_value(variable)) for variable in variables.values()]
    known = [(variable, value) for variable, value in values if value is not None]
    return lambda: keras.StatelessScope(state_mapping=known, collect_losses=True)


def _in_place(layers: list[Any]) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that opens a context, in which variables have the values that they have now.

    When the context closes, it undoes what a layer has assigned and which losses it has added there.
    """
    begun = [(variable, _value(variable)) for variable in rematerialized.state_of(layers)]

    @contextlib.contextmanager
    def as_then() -> Iterator[None]:
        now = [(variable, _value(variable)) for variable, _ in begun]
        losses = [(layer, list(layer._losses)) for layer in layers]
        try:
            for variable, value in begun:
                _put(variable, value)
            yield
        finally:
            for variable, value in now:
                _put(variable, value)
            for layer, before in losses:
                layer._losses[:] = before

    return as_then


def _value(variable: Any) -> tuple[Any, torch.Tensor]:
    """Return the tensor that a variable holds, and a copy of its elements."""
    return variable._value, _local(variable._value).clone()


def _put(variable: keras.Variable, value: tuple[Any, torch.Tensor]) -> None:
    """Give a variable back what it held; autograd, which may have kept it, is not told: the elements are the same."""
    held, elements = value
    variable._value = held
    _local(held).copy_(elements)


def _local(value: Any) -> torch.Tensor:
    return (value._local_tensor if isinstance(value, DTensor) else value).data
