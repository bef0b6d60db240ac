"""Layers that are computed again in the backward pass: `torch.utils.checkpoint`, with the state of the first run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends import rematerialized
from keras_flow.backends.torch.step import computing, current_step


def remat(
    _: object, original: Callable[..., Callable[..., object]], function: Callable[..., object]
) -> Callable[..., object]:
    """Hook on `remat`: the second run of a layer computes the same rows, draws the same numbers, changes nothing."""

    def call(*args: object, **kwargs: object) -> object:
        step = current_step()
        # as in the first run: on its rows, or on all
        again = contextlib.nullcontext if step is None else functools.partial(computing, step, step.inside)
        layers = rematerialized.layers_of(function)
        begun = [(variable, _value(variable)) for variable in rematerialized.state_of(layers)]
        runs = 0

        def run(*inner_args: object, **inner_kwargs: object) -> object:
            nonlocal runs
            runs += 1
            if runs == 1:
                return function(*inner_args, **inner_kwargs)
            with again(), _as_then(begun, layers):
                return function(*inner_args, **inner_kwargs)

        return original(run)(*args, **kwargs)

    return call


@contextlib.contextmanager
def _as_then(begun: list[tuple[Any, tuple[Any, torch.Tensor]]], layers: list[Any]) -> Iterator[None]:
    """Inside, variables have the values of another time; what is assigned and which losses are added is undone."""
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


def _value(variable: Any) -> tuple[Any, torch.Tensor]:
    """What a variable holds, and a copy of its elements."""
    return variable._value, _local(variable._value).clone()


def _put(variable: keras.Variable, value: tuple[Any, torch.Tensor]) -> None:
    """Give a variable back what it held; autograd, which may have kept it, is not told: the elements are the same."""
    held, elements = value
    variable._value = held
    _local(held).copy_(elements)


def _local(value: Any) -> torch.Tensor:
    return (value._local_tensor if isinstance(value, DTensor) else value).data
