"""`kf.DistributedDataParallel` on torch: torch's own, around the Keras model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_flow.backends.engine_records import Replica
from keras_flow.backends.torch.collectives import process_group


def make_replica(model: keras.Model, ranks: tuple[int, ...], bucket_bytes: int, find_unused: bool) -> Replica:
    """Use torch's DistributedDataParallel, which averages in buckets while the backward pass runs."""
    if len(ranks) == 1:
        return Replica(model, lambda loss_function, has_aux: _gradients_of(model, None, loss_function, has_aux))
    averaged = _Averaged(
        model,
        lambda: DistributedDataParallel(
            model,  # type: ignore[arg-type]  # on torch a Keras model is a torch module
            process_group=process_group(ranks),
            bucket_cap_mb=bucket_bytes / 2**20,  # type: ignore[arg-type]  # a fraction is taken too
            find_unused_parameters=find_unused,
            # weights are equal already, and Keras's moving statistics are parameters to torch, not buffers:
            # kf.DistributedDataParallel sends both
            init_sync=False,
            forward_sync_buffers=False,
        ),
    )
    return Replica(
        averaged,
        lambda loss_function, has_aux: _gradients_of(model, averaged, loss_function, has_aux),
        averages=True,
        no_sync=averaged.no_sync,
        is_recorded=lambda: averaged.is_synced and torch.is_grad_enabled(),
    )


class _Averaged:
    """A model in torch's DistributedDataParallel, which is made anew where other weights of the model are trained.

    torch's takes those that have gradients when it is made: a layer that is trained later would not be averaged.
    """

    def __init__(self, model: keras.Model, make: Callable[[], DistributedDataParallel]):
        self.is_synced = True
        #: gradients of `no_sync` wait for the next ones
        self.has_kept = False
        self._model, self._make = model, make
        self._trained: list[keras.Variable] = []
        self._wrapped: DistributedDataParallel | None = None
        self._follow()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._follow()
        # without a trained weight there is nothing to average, and torch has no wrapper
        return (self._wrapped or self._model)(*args, **kwargs)

    def _follow(self) -> None:
        trained = list(self._model.trainable_weights)
        if [*map(id, trained)] != [*map(id, self._trained)]:
            self._trained, self._wrapped = trained, self._make() if trained else None
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = self.is_synced

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        was_synced, self.is_synced = self.is_synced, False
        try:
            yield
        finally:
            self.is_synced = was_synced


def _gradients_of(
    model: keras.Model, averaged: _Averaged | None, loss_function: Callable[..., Any], has_aux: bool
) -> Callable[..., tuple[Any, list[Any]]]:
    def step(*args: Any) -> tuple[Any, list[Any]]:
        values = [each.value for each in model.trainable_weights]
        if averaged is None or not averaged.has_kept:
            _clear(values)  # Keras's `fit` leaves gradients, as a step that raised does
        # arrays become tensors, as where a loss function is traced: torch subtracts none from a tensor with a gradient
        tensors = cast("tuple[Any, ...]", keras.tree.map_structure(_tensor, args))  # the structure it was given
        result = loss_function(*tensors)
        (result[0] if has_aux else result).backward()
        values = [each.value for each in model.trainable_weights]
        found = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
        if averaged is None or averaged.is_synced:
            _clear(values)
        if averaged is not None:
            averaged.has_kept = not averaged.is_synced
        return _detached(result), found

    return step


def _clear(values: Sequence[torch.Tensor]) -> None:
    for value in values:
        value.grad = None


def _tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _detached(result: Any) -> Any:
    return keras.tree.map_structure(lambda each: each.detach() if torch.is_tensor(each) else each, result)
