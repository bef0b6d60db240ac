"""Calls that one process makes alone with a model whose weights it has whole: Keras's own method, on one device.

The call computes with copies of the model's variables, under no distribution. It leaves no trace, since the other
processes do not make it: metrics, seeds and compiled functions are afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keras_flow.backends import random_states
from keras_flow.backends.active import backend
from keras_flow.backends.files import exporting, shared_files
from keras_flow.current import models
from keras_flow.current.distribution import as_under

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution

#: methods of models that change nothing which the other processes have
METHODS = frozenset(["evaluate", "predict", "test_on_batch", "predict_on_batch", "generate"])
#: what Keras keeps of the calls before, for the layouts of these
_KEPT = ("test_function", "predict_function", "generate_function", "_eval_epoch_iterator", "_jax_state_synced")


def is_possible(model: keras.Model, method: str) -> bool:
    """Whether a process needs no other one for a method of a model."""
    return method in METHODS and models.is_built(model) and not shared_files.is_split(model)


def run(
    distribution: Distribution, method: Callable[..., object], model: keras.Model, *args: object, **kwargs: object
) -> object:
    """Call a method of a model on this process's first rank."""
    engine = backend()
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:  # within a loop of Keras on JAX the variables are empty
        sync()
    with (
        random_states.unchanged(),
        engine.on_rank(engine.world().local_ranks[0]),
        exporting.whole(model),
        _unchanged(model),
        as_under(distribution),
    ):
        return method(model, *args, **kwargs)


@contextmanager
def _unchanged(model: keras.Model) -> Iterator[None]:
    """Let Keras make its functions and metrics of a model anew inside, and restore the former ones afterwards."""
    kept = {name: getattr(model, name) for name in _KEPT if hasattr(model, name)}
    # metrics and losses that are not built yet are built inside, from plain tensors
    parts = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    before = [(part, dict(vars(part))) for part in parts if part is not None and not part.built]
    for name in kept:
        if name.endswith("_function"):
            setattr(model, name, None)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(model, name, value)
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
