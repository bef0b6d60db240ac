"""`verify="first_batch"`: verifies the first batch of the first `fit` before anything is trained."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras

from keras_flow.backends import random_states
from keras_flow.current import models
from keras_flow.errors import FlowError
from keras_flow.verify.run import verify

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

#: Keras's own default of `fit(batch_size=...)`
_BATCH_SIZE = 32


def verified(
    distribution: FlowDistribution,
    model: keras.Model,
    fit: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Verify the first batch of a call of `fit`.

    Returns:
        The arguments for `fit`: the given ones; instead of a generator one that yields the verified batch again.

    Raises:
        FlowError: the distributed step differs from one device, or the first batch of such data cannot be read.
    """
    bound = inspect.signature(fit).bind(model, *args, **kwargs)
    given = bound.arguments
    x = given.get("x")
    if isinstance(x, Iterator):
        batch = next(x)
        given["x"] = _chained(batch, x)
    else:  # `fit` reads it again, and draws again
        with random_states.unchanged(), _kept_generators(x):
            batch = _first(given)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    if not models.is_built(model):
        model._symbolic_build(data_batch=(x, y, weight))  # what `fit` itself would do now
    verify(distribution, model, x, y, weight).raise_if_wrong()
    return bound.args[1:], bound.kwargs


@contextlib.contextmanager
def _kept_generators(x: Any) -> Iterator[None]:
    """Afterwards torch's generators that a DataLoader and its sampler have of their own are where they were."""
    given: list[Any] = [getattr(part, "generator", None) for part in (x, getattr(x, "sampler", None))]
    states = [(each, each.get_state()) for each in given if hasattr(each, "get_state")]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _first(given: dict[str, Any]) -> Any:
    """The first batch of data that can be read again."""
    x = given.get("x")
    if isinstance(x, keras.utils.PyDataset):
        return x[0]
    leaves = keras.tree.flatten(x)
    if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves):
        rows = slice(0, given.get("batch_size") or _BATCH_SIZE)
        parts = (x, given.get("y"), given.get("sample_weight"))
        return tuple(
            None if part is None else keras.tree.map_structure(lambda leaf: leaf[rows], part) for part in parts
        )
    if x is not None and hasattr(x, "__iter__"):  # a tf.data.Dataset, a DataLoader of torch
        return next(iter(x))
    raise FlowError(
        f'verify="first_batch" cannot look into data of type {type(x).__name__}: give arrays, a PyDataset, a dataset '
        "or a generator, or call dist.verify(model, x, y) on a batch yourself"
    )


def _chained(first: Any, rest: Iterator) -> Iterator:
    """A generator (Keras takes no other iterator) of the first batch and the rest."""
    yield first
    yield from rest
